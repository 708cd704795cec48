"""Drafts in transformers' ``generate``: the same tokens, the same distribution, fewer forwards."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    WatermarkingConfig,
)

import dormouse
from dormouse.history import History
from dormouse.history.generation import _OTHER_WAYS, HistoryCandidates, generate

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
WINDOW = 8
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
PROMPT = torch.tensor([[3, 17, 29, 5, 11, 23, 8, 31, 2, 19, 14, 7]])
NEW_TOKENS = 40


def model_of(kind: str):
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture(scope="module")
def llama():
    return model_of("llama")


@pytest.fixture
def history():
    with History(VOCAB) as history:
        yield history


def plain(model, **options) -> torch.Tensor:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(PROMPT, **options)


def drafted(model, history, **options) -> torch.Tensor:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return generate(model, PROMPT, history, **options)


def response(sequences: torch.Tensor) -> list[int]:
    return sequences[0, PROMPT.shape[1] :].tolist()


def changed(tokens: list[int], every: int) -> list[int]:
    """Returns the tokens with every so manieth another one."""
    return [(t + 1) % VOCAB if at % every == every - 1 else t for at, t in enumerate(tokens)]


def forwards(model, call) -> int:
    """Returns how often the model ran in a call."""
    seen = []
    hook = model.register_forward_hook(lambda *_: seen.append(1))
    call()
    hook.remove()
    return len(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind, history):
    model = model_of(kind)
    own = response(plain(model))
    assert len(set(own)) > 2, "a response that repeats one token shows little"
    for epoch, recorded in enumerate((changed(own, 9), changed(own, 4), own)):
        history.record(PROMPT[0], recorded, epoch=epoch)
        assert response(drafted(model, history)) == own
    stats = history.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_a_repeated_response_takes_few_forwards(llama, history):
    assert forwards(llama, lambda: drafted(llama, history, record_epoch=0)) == NEW_TOKENS
    own = response(plain(llama))
    # 3 + 5 + 7 + 9 + 11 tokens by windows of 2, 4, 6, 8, 10, and 5 more.
    assert forwards(llama, lambda: drafted(llama, history, record_epoch=1)) == 6
    stats = history.stats()
    assert stats["drafted_tokens"] == stats["accepted_tokens"] == NEW_TOKENS - 6
    assert stats["tokens"] == 2 * len(own) == 2 * NEW_TOKENS


def test_drafts_that_are_wrong_cost_nothing_but_room(llama, history):
    own = response(plain(llama))
    wrong = [(token + 1 + at % 3) % VOCAB for at, token in enumerate(own)]
    history.record(PROMPT[0], wrong)
    assert response(drafted(llama, history)) == own
    assert history.stats()["accepted_tokens"] == 0 < history.stats()["drafted_tokens"]
    with History(VOCAB) as empty:
        assert response(drafted(llama, empty)) == own
        assert empty.stats()["drafted_tokens"] == 0


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 20])
def test_an_end_token_ends_wherever_it_is_drafted(llama, history, at):
    own = response(plain(llama))
    history.record(PROMPT[0], own)
    stop = own[at]
    wanted = response(plain(llama, eos_token_id=[stop, VOCAB - 1]))
    assert response(drafted(llama, history, eos_token_id=[stop, VOCAB - 1])) == wanted
    assert wanted[-1] == stop and len(wanted) == own.index(stop) + 1


def test_an_end_that_came_counts_as_drafted(llama, history):
    own = response(plain(llama))
    ended = own[:3]
    assert ended[2] not in ended[:2]
    history.record(PROMPT[0], ended)
    # The window of 2 has the first two; the end is the model's own.
    assert response(drafted(llama, history, eos_token_id=ended[2])) == ended
    assert history.stats()["drafted_tokens"] == history.stats()["accepted_tokens"] == 2
    history.record(PROMPT[0], own[:2], epoch=2)
    assert response(drafted(llama, history, eos_token_id=own[1])) == own[:2]
    assert history.stats()["drafted_tokens"] == history.stats()["accepted_tokens"] == 4


@pytest.fixture(scope="module")
def tokenizer():
    """A character for each id."""
    words = {chr(97 + id): id for id in range(VOCAB)}
    tokens = Tokenizer(models.BPE(words, [], unk_token="a"))
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 20])
def test_a_stop_string_ends_wherever_it_is_drafted(llama, history, tokenizer, at):
    own = response(plain(llama))
    history.record(PROMPT[0], own)
    for stop in (own[at : at + 1], own[at : at + 2]):
        options = {"stop_strings": "".join(map(tokenizer.convert_ids_to_tokens, stop))}
        options["tokenizer"] = tokenizer
        wanted = response(plain(llama, **options))
        assert response(drafted(llama, history, **options)) == wanted
        assert len(wanted) <= at + len(stop) and wanted[-len(stop) :] == stop


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 17])
def test_the_length_is_that_of_generate(llama, history, new_tokens):
    own = response(plain(llama))
    history.record(PROMPT[0], own)
    assert response(drafted(llama, history, max_new_tokens=new_tokens)) == own[:new_tokens]
    stats = history.stats()
    assert stats["drafted_tokens"] == stats["accepted_tokens"]


class NotToken(LogitsProcessor):
    """Forbids one token, the more often the longer the sequence."""

    def __init__(self, token: int):
        self._token = token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3:
            scores[:, self._token] = -float("inf")
        return scores


def test_options_of_generate_hold(llama, history):
    own = response(plain(llama))
    history.record(PROMPT[0], own)
    stop = own[2]
    for options in (
        {"eos_token_id": stop, "min_new_tokens": 10},
        {"logits_processor": LogitsProcessorList([NotToken(own[4])])},
        {"repetition_penalty": 1.3},
        {"generation_config": GenerationConfig(no_repeat_ngram_size=2, eos_token_id=stop)},
    ):
        assert response(drafted(llama, history, **options)) == response(plain(llama, **options))
    found = drafted(
        llama, history, return_dict_in_generate=True, output_scores=True, record_epoch=3
    )
    assert response(found.sequences) == own and len(found.scores) == NEW_TOKENS


def test_two_tokens_sampled_have_the_distribution_of_the_model(history):
    """Pairs of tokens against the model's own probabilities, in FP64."""
    torch.manual_seed(0)
    small = {"vocab_size": 6, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.06}
    model = (
        AutoModelForCausalLM.from_config(transformers.LlamaConfig(**(SIZES | small)))
        .double()
        .eval()
    )
    prompt = torch.tensor([[1, 4, 2, 5, 3]])
    with torch.no_grad():
        rows = torch.cat([prompt.expand(6, -1), torch.arange(6).unsqueeze(1)], dim=1)
        logits = model(rows).logits / 0.8
    first, second = torch.softmax(logits[0, -2], -1), torch.softmax(logits[:, -1], -1)
    wanted = first[:, None] * second
    # A draft of the likeliest first token, and then of an unlikely one.
    draft = [int(first.argmax()), int(second[first.argmax()].argmin()), 0]
    samples, counts = 800, torch.zeros(6, 6, dtype=torch.float64)
    with History(6) as history:
        history.record(prompt[0], draft)
        for _ in range(samples):
            options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 3}
            pair = generate(model, prompt, history, **options)[0, 5:7]
            counts[tuple(pair.tolist())] += 1
        stats = history.stats()
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    # Of a chi-square with 35 degrees of freedom, one in a million is above.
    expected = wanted * samples
    assert float(expected.min()) > 3
    assert float(((counts - expected) ** 2 / expected).sum()) < 90.0


def test_the_model_stays_as_it_is_also_after_an_error(llama, history):
    before = dict(vars(llama)), type(llama)
    drafted(llama, history)

    def fail(*_):
        raise RuntimeError("in the middle")

    hook = llama.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        drafted(llama, history, record_epoch=0)
    hook.remove()
    assert history.stats()["tokens"] == 0
    assert (dict(vars(llama)), type(llama)) == before
    assert response(plain(llama)) == response(drafted(llama, history))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_model": "small"}, "assistant_model is 'small'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3.*accepted: None"),
        ({"num_beams": 2}, "num_beams is 2.*accepted: None, 1"),
        ({"num_return_sequences": 4, "do_sample": True}, "num_return_sequences is 4"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams is 3"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"use_cache": False}, "use_cache is False"),
        ({"custom_generate": "somewhere"}, "custom_generate is 'somewhere'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        (
            {"watermarking_config": WatermarkingConfig()},
            "watermarking_config is .*accepted: None",
        ),
        ({"stopping_criteria": [len]}, "stopping_criteria is .*accepted: None"),
    ],
)
def test_options_that_decode_in_another_way_are_refused_by_name(llama, history, options, message):
    with pytest.raises(dormouse.ArgumentError, match=message):
        generate(llama, PROMPT, history, max_new_tokens=4, **options)


@pytest.mark.parametrize("name", _OTHER_WAYS)
def test_another_way_of_the_models_own_config_is_refused(llama, history, monkeypatch, name):
    monkeypatch.setattr(llama.generation_config, name, "another", raising=False)
    config = GenerationConfig(max_new_tokens=4)
    with pytest.raises(dormouse.ArgumentError, match=f"^{name} is 'another'"):
        generate(llama, PROMPT, history, generation_config=config)


def test_an_option_takes_back_that_of_the_models_own_config(llama, history, monkeypatch):
    wanted = response(plain(llama))
    monkeypatch.setattr(llama.generation_config, "guidance_scale", 1.5)
    assert response(drafted(llama, history, guidance_scale=None)) == wanted


def test_other_models_shapes_and_vocabularies_are_refused(llama, history):
    with pytest.raises(dormouse.ArgumentError, match=r"input_ids are \[2, 12\]; accepted: \[1, "):
        generate(llama, PROMPT.expand(2, -1), history)
    with pytest.raises(dormouse.ArgumentError, match="is the encoder-decoder T5ForConditional"):
        small = {"vocab_size": VOCAB, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
        generate(transformers.T5ForConditionalGeneration(T5Config(**small)), PROMPT, history)
    with pytest.raises(dormouse.ArgumentError, match="model is a Linear"):
        generate(torch.nn.Linear(2, 2), PROMPT, history)
    cache = StaticCache(config=llama.config, max_cache_len=64)
    with pytest.raises(dormouse.ArgumentError, match="past_key_values is a StaticCache"):
        generate(llama, PROMPT, history, past_key_values=cache)
    with History(20) as short, pytest.raises(dormouse.ArgumentError, match="id 0 of end is 23"):
        generate(llama, PROMPT, short, max_new_tokens=4)


def test_candidates_serve_other_loops(history):
    history.record(PROMPT[0], [9, 9, 1, 2])
    candidates = HistoryCandidates(history, PROMPT[0], 17, torch.tensor([2]))
    ids, logits = candidates.get_candidates(PROMPT)
    assert ids[0].tolist() == [*PROMPT[0].tolist(), 9, 9] and logits is None
    sequence = torch.cat([PROMPT, torch.tensor([[9, 9, 1]])], dim=1)
    candidates.update_candidate_strategy(sequence, None, 2)
    assert history.stats()["accepted_tokens"] == 2
    ids, _ = candidates.get_candidates(sequence)
    assert ids.shape[1] == sequence.shape[1], "the end and what is behind it is not a candidate"
    full = torch.cat([sequence, torch.tensor([[2]])], dim=1)
    candidates.update_candidate_strategy(full, None, 0)
    assert history.stats() == history.stats() | {"drafted_tokens": 3, "accepted_tokens": 3}
    for room in (0, 1):
        short = HistoryCandidates(history, PROMPT[0], PROMPT.shape[1] + room + 1)
        ids, _ = short.get_candidates(PROMPT)
        assert ids[0, PROMPT.shape[1] :].tolist() == [9] * room, "beside the model's own token"
