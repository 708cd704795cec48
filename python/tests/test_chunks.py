"""Attention in chunks, and positions that attention counts by itself (Llama 4)."""

from __future__ import annotations

import threading

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
    token_losses,
)
from test_recurrent import error

from dormouse.hf import (
    SharedPrefix,
    UnsupportedModelError,
    Way,
    masks,
    mixers,
    positions,
    registry,
)

FP64_BOUND = 1e-10
SHAPES = [(2, (1,)), (2, (14, 1, 3)), (37, (5, 1, 9, 3, 14)), (23, (1,) * 33), (18, (9, 9))]


@pytest.mark.parametrize("chunk", [1, 9, 10, 37, 40, 400])
def test_groups(chunk, runtime):
    """The prompt ends inside and at the end of chunks; the fourth layer reads all keys."""
    with in_fp64():
        model = zoo_model("llama4_text", limit=chunk)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


@pytest.mark.parametrize("seed", range(3))
def test_trees(seed, runtime):
    with in_fp64():
        model, case = zoo_model("llama4_text", floor_scale=7), random_conversations(seed)
        dense_tree_backward(model, case)
        wanted = take_gradients(model)
        options = {"microbatch_tokens": 9, "block_tokens": 6}
        SharedPrefix(model, runtime).backward(case, token_losses, **options)
        assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("floor_scale", [1, 5, 40, 8192])
def test_positions_that_attention_counts(floor_scale, use_reentrant, runtime):
    """They scale queries of layers without rotary positions."""
    with in_fp64():
        model = zoo_model("llama4_text", floor_scale=floor_scale, attn_scale=2.0)
        if use_reentrant is not None:
            model.train().activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


def test_a_model_that_counts_from_zero_is_refused(runtime, monkeypatch):
    """In parts, at any length: the check shortens what decides when positions matter."""
    monkeypatch.setattr(mixers, "_that_count", lambda layers: [])
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.PARTS])
    model = zoo_model("llama4_text", floor_scale=8192)
    with pytest.raises(UnsupportedModelError, match="is not exact"):
        SharedPrefix(model, runtime).backward(group(), loss_fn)


def test_positions_of_another_thread_and_of_other_modules():
    class Counts(torch.nn.Module):
        def forward(self, count):
            return torch.arange(count, device="cpu")

    module, other, seen = Counts(), Counts(), []
    wanted = torch.tensor([5, 6, 5])

    def evaluate():
        seen.append(module(3).tolist())

    with positions.use([module], wanted):
        assert module(3).tolist() == [5, 6, 5]
        assert module(4).tolist() == [0, 1, 2, 3]
        assert other(3).tolist() == torch.arange(3).tolist() == [0, 1, 2]
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        module(3).add_(1)
        assert module(3).tolist() == [5, 6, 5], "what a module receives is its own"
        with pytest.raises(TypeError):
            module("three")
        assert torch.arange(3).tolist() == [0, 1, 2]
    assert module(3).tolist() == seen[0] == [0, 1, 2] and not module._forward_hooks


def test_chunks_beside_a_window_are_refused():
    x, module = torch.randn(1, 2, 6, 4), torch.nn.Identity()
    with registry.use(lambda call: call.value):
        with pytest.raises(UnsupportedModelError, match="window of 2 tokens and a mask of chunks"):
            registry.attention(module, x, x, x, masks.ChunkMask(3), sliding_window=2)
        with pytest.raises(UnsupportedModelError, match="chunks of 0 tokens.*at least 1"):
            registry.attention(module, x, x, x, masks.ChunkMask(0))


def test_layers_sleep(runtime):
    with in_fp64():
        model = zoo_model("llama4_text", limit=27)
        shared, case = SharedPrefix(model, runtime), group(300, (5, 9, 3))
        assert error(model, shared, case) <= FP64_BOUND
        report = shared.backward(case, loss_fn, microbatch_tokens=20)
        assert report.prefix["asleep_at_b_bytes"] > 0 and not report.notes
