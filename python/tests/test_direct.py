"""Attention outside transformers' registry: by torch's function, and in the model's own code."""

from __future__ import annotations

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import conversations as random_conversations
from models import (
    dense_tree_backward,
    distance,
    group,
    loss_fn,
    take_gradients,
    tiny,
    token_losses,
)
from test_recurrent import error
from transformers import AttentionInterface

from dormouse.hf import SharedPrefix, UnsupportedModelError, Way, biases, direct, mixers

FP64_BOUND = 1e-10
# The longest first: a model with code of its own is checked again before longer sequences.
SHAPES = [(37, (5, 1, 9, 3, 14)), (23, (1,) * 33), (2, (14, 1, 3)), (2, (1,))]
LONG_SHAPES = [(300, (5, 1, 9)), *SHAPES]

# By torch's function.
FALCONS = {
    "multi-query": {},
    "many heads": {"multi_query": False, "num_kv_heads": 4},
    "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "not parallel": {"parallel_attn": False, "bias": True},
    "own attention eager": {"_attn_implementation": "eager"},
}
# In their own code; the last two with biases by position (ALiBi).
OWN = ("gptj", "codegen", "xglm", "gpt_neox_japanese", "rembert", "bloom", "mpt")
# Windows by place, and positions that the model counts: one response at a time.
ALONE = ("gpt_neo", "roformer", "bart", "marian", "pegasus", "trocr")
# By transformers' registry with masks of their own, or twice: over joined keys.
JOINED = ("doge", "diffllama", "deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4", "dots3_note_text")


@pytest.mark.parametrize("name", FALCONS)
def test_falcon(name, runtime):
    with in_fp64():
        model = zoo_model("falcon", **FALCONS[name])
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


def refused(model, runtime, match: str, case=None) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        SharedPrefix(model, runtime).backward(case or group(), loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


class _Layer(torch.nn.Module):
    """One attention layer that passes ``mask`` to torch's function."""

    def forward(self, x, mask, **others):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask, **others)


LOWEST = torch.finfo(torch.float64).min
SEEN = torch.ones(5, 5, dtype=torch.bool).tril()
ADDED = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~SEEN, LOWEST)
MASKS = {
    "booleans": (SEEN[None, None], True),
    "numbers": (ADDED, True),
    "infinities": (ADDED.masked_fill(~SEEN, -torch.inf), True),
    "a window": (SEEN & SEEN.triu(-2).bool(), False),
    "all": (torch.ones(5, 5, dtype=torch.bool), False),
    "padding": (SEEN & (torch.arange(5) > 0), False),
    "a bias": (ADDED + 0.5 * SEEN, False),
    "more keys": (torch.ones(5, 6, dtype=torch.bool).tril(), False),
    "none": (None, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """A mask is accepted if it is causal and nothing else, and each is looked at anew."""
    mask, is_accepted = MASKS[name]
    layer, calls, x = _Layer(), [], torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def attend(call):
        calls.append(call)
        return call.value

    with direct.use([layer], attend):
        layer(x, SEEN)
        layer(x, None, is_causal=True, scale=0.3)
        assert [call.rules.scale for call in calls] == [0.5, 0.3]
        assert all(call.module is layer for call in calls)
        if is_accepted:
            layer(x, mask)
            assert len(calls) == 3
        else:
            with pytest.raises(UnsupportedModelError, match="mask to its attention"):
                layer(x, mask)
        changed = SEEN.clone()
        layer(x, changed)
        changed[4, 1] = False
        with pytest.raises(UnsupportedModelError, match="mask to its attention"):
            layer(x, changed)
        with pytest.raises(UnsupportedModelError, match=r"dropout 0.1"):
            layer(x, SEEN, dropout_p=0.1)
        outside = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert outside.shape == x.shape and len(calls) == (4 if is_accepted else 3)


@pytest.mark.parametrize("kind", OWN)
def test_attention_in_own_code(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


def test_a_window_in_own_code(runtime):
    """Responses share microbatches while no sequence is longer than the window."""
    with in_fp64():
        model = zoo_model("gpt_neo", window_size=40)
        shared, case = SharedPrefix(model, runtime), group(37, (5, 1, 9))
        assert error(model, shared, group(17, (5, 1, 9))) <= FP64_BOUND
        assert shared.check(group(17, (5, 1, 9))).way is Way.JOINED
        assert error(model, shared, case) <= FP64_BOUND
        assert shared.check(case).way is Way.ALONE
        # The state keeps its way.
        assert error(model, shared, group(17, (5, 1, 9))) <= FP64_BOUND
        assert shared.check(group(17, (5, 1, 9))).way is Way.ALONE


@pytest.mark.parametrize("kind", ALONE)
def test_one_response_at_a_time(kind, runtime):
    """In groups and in trees."""
    conversations = random_conversations(1)
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in LONG_SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)
        dense_tree_backward(model, conversations)
        wanted = take_gradients(model)
        options = {"microbatch_tokens": 9, "block_tokens": 6}
        report = shared.backward(conversations, token_losses, **options)
        assert distance(take_gradients(model), wanted) <= FP64_BOUND
        assert report.checked.way is Way.ALONE


@pytest.mark.parametrize("kind", JOINED)
def test_joined_keys(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


ALIBI = {
    "bloom": {},
    "bloom with six heads": {"n_head": 6, "hidden_size": 96},
    "mpt": {},
    "falcon": {"alibi": True},
    "falcon eager": {"alibi": True, "_attn_implementation": "eager"},
    "falcon of many heads": {"alibi": True, "multi_query": False, "num_kv_heads": 4},
}


@pytest.mark.parametrize("name", ALIBI)
def test_biases_by_position(name, runtime):
    """In groups and in trees. Falcon rounds its biases to BF16."""
    conversations = random_conversations(1)
    with in_fp64():
        model = zoo_model(name.split()[0], **ALIBI[name])
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in LONG_SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)
        dense_tree_backward(model, conversations)
        wanted = take_gradients(model)
        shared.backward(conversations, token_losses, microbatch_tokens=9, block_tokens=6)
        assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_biases_by_the_place_among_joined_keys_are_seen(runtime, monkeypatch):
    """As a model's own code would build them: keys of two responses lie behind each other."""
    own = biases.build
    monkeypatch.setattr(biases, "build", lambda call, at: own(call, torch.arange(len(at))))
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.JOINED])
    refused(zoo_model("bloom"), runtime, "not exact")


def test_rows_that_depend_on_later_tokens_are_refused(runtime, monkeypatch):
    """A response alone is a whole pass, in which the last token is that of the dense run."""
    model = tiny()
    mlp = model.model.layers[-1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.1 * x[:, -1:]
    refused(model, runtime, "not exact")
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.ALONE])
    refused(model, runtime, "rows of the model depend on later tokens: logits differ by 0.* causal")


def test_dropout_one_response_at_a_time(runtime):
    """The check's masks follow from positions, which the model counts."""
    with in_fp64():
        model = zoo_model("gpt_neo").train()
        for block in model.transformer.h:
            block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(0.3))
        shared = SharedPrefix(model, runtime, prompt_dropout=False)
        checked = shared.backward(group(), loss_fn).checked
    assert checked.way is Way.ALONE and checked.error <= FP64_BOUND


def test_one_response_at_a_time_fills_no_microbatches(runtime):
    with in_fp64():
        model, rows = zoo_model("gpt_neo"), []
        shared, case = SharedPrefix(model, runtime), group(37, (5, 1, 9))
        shared.backward(case, loss_fn)
        model.transformer.wte.register_forward_pre_hook(lambda m, args: rows.append(args[0].numel()))
        shared.backward(case, loss_fn)
        rows.clear()
        report = shared.backward(case, loss_fn)
    assert rows == [36, 5, 1, 9] and report.counts["microbatches"] == 1


def test_layers_sleep(runtime):
    with in_fp64():
        model = zoo_model("falcon")
        shared = SharedPrefix(model, runtime)
        shared.backward(group(9, (3,)), loss_fn)
        model.zero_grad(set_to_none=True)
        case = group(300, (5, 9, 3))
        report = shared.backward(case, loss_fn, microbatch_tokens=20)
        assert report.prefix["asleep_at_b_bytes"] > 0 and not report.notes
        model.zero_grad(set_to_none=True)
        assert error(model, shared, case) <= FP64_BOUND


def registered(alter):
    """An attention implementation of the trainer's own, which changes scores by ``alter``."""

    def attention(module, query, key, value, mask, scaling=None, **others):
        count = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(count, 1) for x in (key, value))
        scores = alter(query @ key.transpose(-1, -2) * scaling, key)
        if mask is None:
            rows, keys = scores.shape[-2:]
            seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
        return ((scores + mask).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attention


REGISTERED = {
    "a soft cap": (lambda scores, key: 2 * torch.tanh(scores / 2), Way.JOINED),
    "a bias by the key": (lambda scores, key: scores + key.norm(dim=-1).unsqueeze(2), Way.JOINED),
    "a bias by the place": (
        lambda scores, key: scores + 0.3 * torch.arange(key.shape[2]),
        Way.ALONE,
    ),
    "the mean of all keys": (lambda scores, key: scores * key.mean(2).norm(), None),
    "the number of rows": (lambda scores, key: scores * (1 + (scores.shape[2] > 30)), None),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_attention(name, runtime, monkeypatch):
    alter, way = REGISTERED[name]
    entries = AttentionInterface._global_mapping
    monkeypatch.setitem(entries, "registered", registered(alter))
    model = tiny()
    model.config._attn_implementation = "registered"
    if way is None:
        refused(model, runtime, "not exact")
        return
    shared = SharedPrefix(model, runtime)
    for prompt, lengths in SHAPES:
        assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)
    assert shared.check().way is way


def test_a_state_keeps_its_way_and_another_finds_its_own(runtime):
    """Attention in parts, then with a bias of the trainer's own, and back."""
    model = tiny()
    shared, case = SharedPrefix(model, runtime), group()

    def step():
        assert error(model, shared, case) <= FP64_BOUND
        report = shared.backward(case, loss_fn)
        model.zero_grad(set_to_none=True)
        return report.checked

    entries = AttentionInterface._global_mapping
    entries["registered"] = registered(REGISTERED["a soft cap"][0])
    try:
        parts = step()
        model.config._attn_implementation = "registered"
        joined = step()
        assert joined.way is Way.JOINED and parts.way is Way.PARTS
        assert step() is joined
        assert shared.backward(random_conversations(2), token_losses).checked.way is Way.JOINED
        model.zero_grad(set_to_none=True)
        model.config._attn_implementation = "sdpa"
        assert step().way is Way.PARTS
    finally:
        del entries["registered"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["gptj", "bloom", "doge", "deepseek_v32", "gpt_neo"])
def test_checkpointed_layers_that_read_a_cache(kind, use_reentrant, runtime):
    with in_fp64():
        model = zoo_model(kind).train()
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)
