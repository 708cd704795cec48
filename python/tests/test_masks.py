"""Windows that reach attention in masks alone."""

from __future__ import annotations

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import group, loss_fn
from test_recurrent import error

from dormouse.hf import SharedPrefix, UnsupportedModelError, Way, attention, mixers, registry
from dormouse.hf.masks import WindowMask


def test_a_window_longer_than_every_sequence_but_one(runtime):
    """The check shortens windows, so the mask's is known before it matters."""
    with in_fp64():
        model = zoo_model("phimoe", limit=30)
        shared = SharedPrefix(model, runtime)
        for prompt in (9, 40):
            assert error(model, shared, group(prompt, (5, 1, 9, 3))) <= 1e-10
        assert shared.check().tokens < 30


@pytest.mark.parametrize("passed", [None, 3])
def test_a_window_in_place_of_a_mask(passed):
    x = torch.randn(1, 2, 6, 4)
    calls = []

    def attend(call):
        calls.append(call)
        return call.value

    module = torch.nn.Identity()
    with registry.use(attend):
        registry.attention(module, x, x, x, WindowMask(3), sliding_window=passed)
        with pytest.raises(UnsupportedModelError, match="window of 3 tokens and a mask of 2"):
            registry.attention(module, x, x, x, WindowMask(2), sliding_window=3)
        for nothing in ({"sliding_window": 0}, {"attention_mask": WindowMask(0)}):
            with pytest.raises(UnsupportedModelError, match="window of 0 tokens.*at least 1"):
                registry.attention(module, x, x, x, **({"attention_mask": None} | nothing))
    assert calls[0].rules == attention.Rules(0.5, 3)


def test_masks_are_the_models_own_outside_a_step(runtime):
    with in_fp64():
        model = zoo_model("phimoe")
        tokens = torch.arange(3, 40).unsqueeze(0)
        with torch.no_grad():
            wanted = model(input_ids=tokens, use_cache=False).logits
            SharedPrefix(model, runtime).check()
            assert torch.equal(model(input_ids=tokens, use_cache=False).logits, wanted)


def test_an_overlay_over_a_window(runtime, monkeypatch):
    """A mask that says more than its window: the model builds its own, for one response at a
    time."""
    from transformers.models.phimoe import modeling_phimoe

    real = modeling_phimoe.create_sliding_window_causal_mask

    def with_overlay(*args, **kwargs):
        overlay = lambda batch, head, query, key: key != 2  # noqa: E731
        return real(*args, **kwargs, and_mask_function=overlay)

    monkeypatch.setattr(modeling_phimoe, "create_sliding_window_causal_mask", with_overlay)
    with in_fp64():
        model = zoo_model("phimoe")
        shared = SharedPrefix(model, runtime)
        assert error(model, shared, group(23, (5, 1, 9))) <= 1e-10
        assert shared.check().way is Way.ALONE
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.PARTS, Way.JOINED])
    with pytest.raises(UnsupportedModelError, match="not exact"):
        SharedPrefix(zoo_model("phimoe"), runtime).backward(group(), loss_fn)
