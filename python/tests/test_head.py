"""Graphs that are kept end at the hidden states: the model's head runs apart, by its own code."""

from __future__ import annotations

import peft
import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, take_gradients, tiny
from test_token_scores import a_batch, dense, loss_of, padded
from transformers import LlamaForCausalLM

from dormouse.hf import SharedPrefix, head, support
from dormouse.hf.scored_model import ScoredModel

CPU = torch.device("cpu")
RESPONSE_TOKENS = 27
"""Of :func:`a_batch`."""


@pytest.fixture
def head_rows(monkeypatch):
    """Rows whose logits are computed apart, of each run."""
    rows, logits = [], head.Head.logits

    def counted(self, hidden):
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(head.Head, "logits", counted)
    return rows


def check_kept(model, runtime, temperature: float = 1.0, **options) -> None:
    """Compares values and gradients of the mode "kept" with those of the dense batch."""
    ids, mask, keep = a_batch()
    values = dense(model, ids, mask, keep, temperature)
    loss_of(*values, mask[:, -keep:]).backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime, **options)
    options = {"temperature": temperature, "microbatch_tokens": 7, "graphs": "kept"}
    scores = shared.score(ids, mask, keep=keep, entropy=True, **options)
    loss_of(scores.log_probabilities, scores.entropies, mask[:, -keep:]).backward()
    torch.testing.assert_close(scores.log_probabilities, values[0], rtol=0, atol=1e-10)
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("holds_logits", [True, False])
# Soft caps, factors, a bias, scaled embeddings, learned positions.
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "granite", "cohere", "phi", "gpt2"])
def test_the_head_of_a_model_runs_apart(kind, holds_logits, runtime, head_rows, monkeypatch):
    monkeypatch.setattr(ScoredModel, "_holds_logits", lambda *_: holds_logits)
    with in_fp64():
        check_kept(zoo_model(kind), runtime, 0.7)
    runs = 1 if holds_logits else 2
    assert sum(head_rows) == head.CHECK_TOKENS + runs * RESPONSE_TOKENS


def with_small_gradients(**changes) -> torch.nn.Module:
    """Smaller than the logits of :func:`a_batch`."""
    model = tiny(**changes).requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("sleep", [True, False])
@pytest.mark.parametrize("make", [tiny, with_small_gradients])
def test_logits_are_kept_up_to_the_size_of_gradients(make, sleep, runtime, head_rows):
    check_kept(make(), runtime, sleep=sleep)
    runs = 2 if sleep and make is with_small_gradients else 1
    assert sum(head_rows) == head.CHECK_TOKENS + runs * RESPONSE_TOKENS


@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_logits_are_not_held(graphs, runtime):
    model = with_small_gradients(vocab_size=20_000, dtype=torch.float32, num_hidden_layers=1)
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "graphs": graphs, "microbatch_tokens": 7}
    shared.score(ids, mask, **options)

    def allocated_bytes() -> int:
        return runtime.stats()["allocated"]["current_bytes"]

    before = allocated_bytes()
    scores = shared.score(ids, mask, **options)
    logits_bytes = int(mask[:, -keep:].sum()) * 20_000 * 4
    assert scores.log_probabilities.requires_grad
    assert allocated_bytes() - before < logits_bytes / 4


@pytest.mark.parametrize("sleep", [True, False])
def test_a_backward_allocates_no_second_logits(sleep, runtime):
    model = tiny(vocab_size=20_000, dtype=torch.float32, num_hidden_layers=1)
    ids, mask, keep = padded([6, 6, 6], [30, 40, 50])
    shared = SharedPrefix(model, runtime, sleep=sleep)
    options = {"keep": keep, "graphs": "kept"}
    shared.score(ids, mask, **options).log_probabilities.sum().backward()
    take_gradients(model)
    scores = shared.score(ids, mask, **options)
    before = runtime.stats()["allocated"]["current_bytes"]
    runtime.reset_peaks()
    scores.log_probabilities.sum().backward()
    peak_bytes = runtime.stats()["allocated"]["peak_bytes"] - before
    logits_bytes = int(mask[:, -keep:].sum()) * 20_000 * 4
    # That of the output embedding comes while logits are there, the rest after them.
    assert peak_bytes < model.lm_head.weight.nbytes + logits_bytes / 4


class PassedBy(LlamaForCausalLM):
    """Logits have a gradient by more than the last hidden states."""

    def forward(self, **options):
        output = super().forward(**options, output_hidden_states=True)
        if output.hidden_states is not None:
            output.logits = output.logits + 0 * output.hidden_states[1].sin().sum()
        return output


class Counted(LlamaForCausalLM):
    """Logits depend on the number of forwards."""

    count = 0

    def forward(self, **options):
        self.count += 1
        output = super().forward(**options)
        output.logits = output.logits * (1 + self.count)
        return output


class ByToken(LlamaForCausalLM):
    """Logits depend on the tokens too."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits * (1 + input_ids[..., None] % 3)
        return output


class BySecond(LlamaForCausalLM):
    """Logits depend on the second token."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits * (2 + input_ids[0, 1])
        return output


class Squashed(LlamaForCausalLM):
    """The backward of the logits reads them."""

    def forward(self, **options):
        output = super().forward(**options)
        output.logits = self.seen(output.logits.tanh())
        return output

    @staticmethod
    def seen(logits):
        return logits


# Views of a tensor ``[1, rows, vocab]``, of the same elements.
VIEWS = {
    "itself": lambda x: x,
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.expand_as(x),
    "as_strided": lambda x: x.as_strided(x.shape, x.stride()),
    "movedim": lambda x: x.movedim(0, 1).movedim(1, 0),
    "unfold": lambda x: x.unfold(0, 1, 1).squeeze(-1),
    "diagonal": lambda x: x.unsqueeze(0).diagonal().permute(2, 0, 1),
}


def of_class(kind) -> torch.nn.Module:
    model = tiny()
    model.__class__ = kind
    return model


def test_heads_that_cannot_run_apart(monkeypatch):
    def found(model):
        return head.of(support.resolve(model), CPU)

    assert found(tiny()) is not None
    assert found(of_class(Squashed)) is None, "not transformers' code"
    monkeypatch.setattr(support, "TRANSFORMERS", "/")
    assert found(of_class(Squashed)) is not None
    assert found(of_class(ByToken)) is None
    assert found(of_class(BySecond)) is None
    assert found(of_class(PassedBy)) is None
    assert found(of_class(Counted)) is None
    for place in (lambda model: model, lambda model: model.model):
        model = tiny()
        place(model).register_forward_hook(lambda module, args, output: None)
        assert found(model) is None
        model = tiny()
        place(model).forward = place(model).forward
        assert found(model) is None
    model = tiny().train()
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.1), model.lm_head)
    assert found(model) is None
    assert found(model.eval()) is not None


@pytest.mark.parametrize("holds_logits", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_logits_that_their_backward_reads(view, holds_logits, monkeypatch, runtime, head_rows):
    monkeypatch.setattr(Squashed, "seen", staticmethod(VIEWS[view]))
    monkeypatch.setattr(ScoredModel, "_holds_logits", lambda *_: holds_logits)
    monkeypatch.setattr(support, "TRANSFORMERS", "/")
    check_kept(of_class(Squashed), runtime)
    assert head_rows


def test_logits_that_an_operation_reads_unseen(monkeypatch, runtime):
    """Autograd refuses to go on; no gradient is wrong in silence."""

    def in_part(logits):
        logits[..., :50].tanh_()
        return logits

    monkeypatch.setattr(Squashed, "seen", staticmethod(lambda x: in_part(x.clone())))
    monkeypatch.setattr(support, "TRANSFORMERS", "/")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check_kept(of_class(Squashed), runtime)


def test_logits_are_kept_otherwise(runtime, head_rows):
    model = tiny()
    model.register_forward_hook(lambda module, args, output: None)
    check_kept(model, runtime)
    assert not head_rows


def test_with_adapters(runtime, head_rows):
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
    model = peft.get_peft_model(tiny(), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    check_kept(model.double(), runtime)
    assert head_rows


@pytest.mark.parametrize("ties", [False, True])
def test_the_embedding_runs_backward_once(ties, runtime):
    """For all passes. A padding token has no gradient."""
    model = tiny(tie_word_embeddings=ties, pad_token_id=5)
    ids, mask, keep = a_batch()
    ids[0, 8], ids[:, -keep] = 5, 5
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs="kept", microbatch_tokens=7)
    assert scores.counts["microbatches"] > 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scores.log_probabilities.sum().backward()
    counts = {each.key: each.count for each in profile.key_averages()}
    assert counts["aten::embedding_dense_backward"] == 1
    assert distance(take_gradients(model), wanted) < 1e-10


def test_prompts_sleep_where_their_embedding_is_cut_off(runtime):
    model = tiny(dtype=torch.float32)
    ids, mask, keep = padded([200, 200], [4, 6])
    shared = SharedPrefix(model, runtime)
    shared.score(ids, mask, keep=keep, graphs="kept")
    before = runtime.stats()["asleep"]["current_bytes"]
    scores = shared.score(ids, mask, keep=keep, graphs="kept")
    (step,) = (step for *_, step in scores.log_probabilities.grad_fn.call._steps)
    assert not step._report.notes, "the graph is the probed one"
    assert runtime.stats()["asleep"]["current_bytes"] > before
