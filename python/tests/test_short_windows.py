"""Windows are short to the thread that checks the model, and to no other."""

from __future__ import annotations

import threading

import pytest
import torch
from model_zoo import zoo_model
from torch.utils.checkpoint import checkpoint

from dormouse.hf import SharedPrefix, checkpointing, short_windows

LIMIT = 11


def windows(model) -> set[int]:
    """What the model says of itself."""
    modules = [layer.self_attn.sliding_window for layer in model.model.layers]
    return {model.config.sliding_window, *modules} - {None}


def on_another_thread(work):
    """Returns ``work()``."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_another_thread_evaluates_the_model_that_is_checked(is_compiled, runtime):
    model = zoo_model("gemma3_text", torch.float32, limit=LIMIT).eval()
    tokens, seen, own = torch.arange(30)[None], [], []
    with torch.no_grad():
        alone = model(input_ids=tokens, use_cache=False).logits
    checking = threading.get_ident()

    def evaluate():
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        return torch.equal(logits, alone), windows(model)

    def hook(module, args, output):
        if threading.get_ident() == checking:
            own.append(windows(model))
            seen.append(on_another_thread(evaluate))

    model.model.layers[-1].mlp.register_forward_hook(hook)
    if is_compiled:
        torch._dynamo.reset()
        for layer in model.model.layers[:-1]:
            layer.compile(backend="eager")
    SharedPrefix(model, runtime, prompt_dropout=False).check()
    assert {short_windows.TOKENS} in own
    assert seen and all(each == (True, {LIMIT}) for each in seen)
    assert windows(model) == {LIMIT}


def test_longer_ones_alone():
    model = zoo_model("gemma3_text", torch.float32, limit=LIMIT)
    model.model.layers[0].self_attn.sliding_window = 4
    with short_windows.use(model, 4):
        assert windows(model) == {4, short_windows.TOKENS}
        # As a trainer's thread may.
        on_another_thread(lambda: setattr(model.config, "sliding_window", 2))
        assert windows(model) == {2, 4, short_windows.TOKENS}


def test_classes_are_as_they_were():
    one, other = (zoo_model("gemma3_text", torch.float32, limit=LIMIT) for _ in range(2))
    kinds = type(one.config), type(one.model.layers[0].self_attn)
    before = [dict(vars(kind)) for kind in kinds]
    outer, inner = short_windows.use(one, 4), short_windows.use(other, 4)
    outer.__enter__()
    inner.__enter__()
    on_another_thread(lambda: None)
    assert [dict(vars(kind)) for kind in kinds] != before
    inner.__exit__()
    assert windows(one) == {short_windows.TOKENS}
    outer.__exit__()
    assert [dict(vars(kind)) for kind in kinds] == before
    assert windows(one) == windows(other) == {LIMIT}


def test_the_attribute_of_a_class():
    """A configuration without one of its own has that of its class."""
    model = zoo_model("gemma3_text", torch.float32, limit=LIMIT)
    kind = type(model.config)
    default = kind.sliding_window
    with short_windows.use(model, 4):
        assert on_another_thread(lambda: kind().sliding_window) == default
        del model.config.sliding_window
        assert model.config.sliding_window == kind.sliding_window == default != LIMIT
        with pytest.raises(AttributeError):
            del model.config.sliding_window
        attention = model.model.layers[0].self_attn
        del attention.sliding_window
        with pytest.raises(AttributeError, match="'Gemma3Attention' object has no attribute"):
            attention.sliding_window


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_on_another_thread(reentrant):
    """As layers are on a GPU, in the backward."""
    model, seen = zoo_model("gemma3_text", torch.float32, limit=LIMIT), []

    def layer(x):
        seen.append(windows(model))
        return x.sin()

    def shorten():
        return short_windows.use(model, 4)

    with shorten(), checkpointing.use(model, shorten):
        x = torch.ones(3, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=reentrant).sum()
        on_another_thread(out.backward)
    assert seen == [{short_windows.TOKENS}] * 2 and x.grad is not None


def test_a_check_of_checkpointed_layers_whose_backward_is_on_another_thread(runtime, monkeypatch):
    model = zoo_model("gemma3_text", torch.float32, limit=LIMIT).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    own, threads, seen = torch.Tensor.backward, [], set()

    def backward(*arguments, **named):
        threads.append(on_another_thread(lambda: own(*arguments, **named)))

    def hook(module, args):
        seen.add((threading.get_ident() == checking, *windows(model)))

    checking = threading.get_ident()
    model.model.layers[0].mlp.register_forward_pre_hook(hook)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    SharedPrefix(model, runtime).check()
    assert threads and (False, short_windows.TOKENS) in seen and (False, LIMIT) not in seen
