"""The recording of epochs: its files, and the sampler."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dormouse.demo import epochs, record, trace
from dormouse.demo.epochs import Answer, Epoch

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}


def an_epoch(number: int) -> Epoch:
    answers = [Answer([number, 5, 6], 1.0, 0.25), Answer([7], 0.0, 1.0)]
    return Epoch(number, dict.fromkeys(trace.read().groups[:2], answers))


def test_what_is_written_is_read(tmp_path):
    names = trace.read().groups[:2]
    for number in range(2):
        epochs.write(an_epoch(number), names, {"seed": 3}, tmp_path)
    found = epochs.read(tmp_path)
    assert found.epochs == [an_epoch(0), an_epoch(1)]
    assert found.settings == {"seed": 3}
    assert found.prompts == {name: trace.read().load(name).prompt for name in names}


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(trace.TraceError, match="is missing"):
        epochs.read(tmp_path)
    epochs.write(an_epoch(0), trace.read().groups[:3], {}, tmp_path)
    with pytest.raises(trace.TraceError, match="epoch 0 has answers to other prompts"):
        epochs.read(tmp_path)
    index = tmp_path / epochs.INDEX_FILE
    index.write_text(json.dumps({"format": 9}))
    with pytest.raises(trace.TraceError, match="format 9; accepted: 1"):
        epochs.read(tmp_path)


def test_temperatures_of_a_batch_are_those_of_its_rows():
    torch.manual_seed(2)
    policy = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    prompt = [3, 1, 4, 15, 9, 2, 6]
    temperatures = (1.0, 1.0, 0.0, 1e-6, 0.0)
    rows, logprobs = record.sample(
        policy, prompt, -1, torch.Generator().manual_seed(0), temperatures, 12
    )
    ids = torch.tensor([prompt])
    greedy = policy.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    greedy = greedy[0, len(prompt) :].tolist()
    assert rows[2] == rows[3] == rows[4] == greedy
    assert rows[0] != rows[1] and rows[0] != greedy
    for row, logs in zip(rows, logprobs, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(row)[:, None])[:, 0]
        assert logs == pytest.approx(own.tolist(), abs=1e-6)
    stop = greedy[3]
    rows, logprobs = record.sample(policy, prompt, stop, torch.Generator(), (0.0, 0.0), 12)
    assert rows == [greedy[: greedy.index(stop) + 1]] * 2
    assert [len(each) for each in logprobs] == [len(each) for each in rows]


class Tokens:
    """A tokenizer that says ids."""

    eos_token_id = 29

    def decode(self, tokens, skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


def test_a_step_trains_on_its_answers_and_the_sampler_follows(runtime):
    torch.manual_seed(2)
    policy = LlamaForCausalLM(LlamaConfig(**SIZES))
    before = copy.deepcopy(policy)
    trainer = epochs.Trainer(policy, Tokens(), 7, runtime)
    prompt = [1, *range(3, 20)]
    # Rewards that differ: some answers have the token 5, all but the greedy ones.
    answers = trainer.step(0, "p", prompt, [["5"], ["11"], ["23"]])
    assert [each.temperature for each in answers] == list(epochs.TEMPERATURES)
    trained = [each.reward for each in answers if each.temperature == epochs.TRAINED]
    assert len(set(trained)) > 1
    moved = [
        float((new - old).detach().abs().max())
        for new, old in zip(policy.parameters(), before.parameters(), strict=True)
    ]
    # The first update of Adam moves a weight with a gradient by the learning rate.
    assert max(moved) == pytest.approx(epochs.LEARNING_RATE, rel=0.1)
    for copied, weights in zip(trainer.sampler.parameters(), policy.parameters(), strict=True):
        assert torch.equal(copied, weights.bfloat16())
    again = epochs.Trainer(before, Tokens(), 7, runtime)
    assert again.step(0, "p", prompt, [["5"], ["11"], ["23"]]) == answers


def test_the_shipped_recording_is_of_the_shipped_prompts():
    found = epochs.read()
    assert set(found.prompts) <= set(trace.read().groups)
    assert len(found.epochs) == epochs.EPOCHS
    for epoch in found.epochs:
        for answers in epoch.answers.values():
            assert [each.temperature for each in answers] == list(epochs.TEMPERATURES)
            assert all(1 <= len(each.tokens) <= epochs.RESPONSE_TOKENS_MAX for each in answers)
