"""The check of a model: when it runs, what it compares, and that it leaves no trace."""

from __future__ import annotations

import random

import pytest
import torch
from model_zoo import zoo_model
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

from dormouse import host_memory
from dormouse.hf import SharedPrefix, UnsupportedModelError, Way, miniature
from dormouse.hf.fingerprint import Fingerprint


def plain(**changes):
    """A model without code of the tests: FP32 norms are transformers' own."""
    return tiny(dtype=torch.float32, num_hidden_layers=2, **changes)


def test_one_check_serves_all_later_steps(runtime):
    shared = SharedPrefix(plain(), runtime)
    first = shared.backward(group(), loss_fn).checked
    assert first.reason == "the first step"
    assert first.dtype is torch.float32 and 0 < first.error <= first.tolerance
    assert shared.backward(group(200, (50,)), loss_fn).checked is first


def test_weights_are_widened_only_where_copies_fit(runtime, monkeypatch):
    def dtype_of_check():
        model = tiny(dtype=torch.bfloat16, num_hidden_layers=2)
        return SharedPrefix(model, runtime).backward(group(), loss_fn).checked.dtype

    assert dtype_of_check() is torch.float32
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 0)
    assert dtype_of_check() is torch.bfloat16


CHANGES = {
    "a patched forward": lambda m: setattr(m.model.norm, "forward", m.model.norm.forward),
    "a hook": lambda m: m.model.layers[1].mlp.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda m: m.lm_head.register_full_backward_hook(lambda *_: None),
    "another head": lambda m: setattr(m, "lm_head", torch.nn.Linear(96, 97, bias=False)),
    "a scale": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.3),
    "the configuration": lambda m: setattr(m.config, "rms_norm_eps", 0.1),
    "a frozen layer": lambda m: m.model.layers[0].requires_grad_(False),
    "another dtype": lambda m: m.double(),
    "a mode": lambda m: m.train(not m.training),
    "more tokens": lambda m: m.resize_token_embeddings(101),
    "a module": lambda m: m.model.layers[1].add_module("extra", torch.nn.Identity()),
    "the layers' order": lambda m: m.model.layers.insert(0, m.model.layers.pop(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_checked_anew(change, runtime):
    model, case = plain().eval(), group(9, (4, 2))
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss_fn).checked
    take_gradients(model)
    CHANGES[change](model)
    report = shared.backward(case, loss_fn)
    assert report.checked is not first
    assert "changed" in report.checked.reason
    got = take_gradients(model)
    dense_backward(model, case)
    assert distance(got, take_gradients(model)) <= 1e-5
    assert shared.backward(case, loss_fn).checked is report.checked


def test_a_changed_class_is_checked_anew(runtime, monkeypatch):
    model, case = plain(), group(9, (4, 2))
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn)
    kind = type(model.model.layers[0].mlp)
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: real(self, x) + x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match=r"output differs is model.layers.0.mlp"):
        shared.backward(case, loss_fn)
    monkeypatch.undo()
    assert shared.backward(case, loss_fn).checked.reason == "the first step"


def test_updated_weights_are_no_change(runtime):
    model, case = plain(), group(9, (4, 2))
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss_fn).checked
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert shared.backward(case, loss_fn).checked is first


def test_each_autocast_has_its_check(runtime):
    model, case = plain(), group(9, (4, 2))
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss_fn).checked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = shared.backward(case, loss_fn).checked
    assert under is not first and "autocast to torch.bfloat16" in under.reason
    assert under.dtype is torch.float32, "compared closely without autocast"
    assert shared.backward(case, loss_fn).checked is first


class Counting(torch.nn.Module):
    """Keeps what it has seen, in a buffer and in attributes, and computes nothing from it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.last = inner, 0, None
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach()
        self.rows += x.shape[1]
        return self.inner(x)


def test_state_that_changes_nothing_is_accepted_and_checked_once(runtime):
    model, case = plain(), group(9, (4, 2))
    model.model.layers[1].mlp = Counting(model.model.layers[1].mlp)
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss_fn).checked
    assert shared.backward(case, loss_fn).checked is first


def test_nothing_is_left_behind(runtime):
    model = zoo_model("gemma3_text", torch.bfloat16).train()
    counting = Counting(model.model.layers[1].mlp)
    model.model.layers[1].mlp = counting
    before = {n: (p, p.data_ptr(), p.clone()) for n, p in model.named_parameters()}
    some = next(iter(before.values()))[0]
    some.grad = torch.ones_like(some)
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    SharedPrefix(model, runtime).check()
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert some.grad.eq(1).all()
    for name, parameter in model.named_parameters():
        same, address, value = before[name]
        assert parameter is same and parameter.data_ptr() == address
        assert torch.equal(parameter, value)
        assert parameter.grad is None or parameter is some
    assert counting.rows == 0, "buffers of the trainer are not seen by the check"
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == windows
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_errors_below_the_rounding_of_bf16_are_found(runtime):
    """In BF16 two dense runs differ by some per cent; this error is less than one."""
    model = plain().to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.003 * x.mean(1, keepdim=True)
    with pytest.raises(UnsupportedModelError, match=r"accepted 0.0002"):
        SharedPrefix(model, runtime).check()


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.half = x.shape[1] // 2
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([torch.zeros_like(grad[:, : ctx.half]), grad[:, ctx.half :]], 1)


@pytest.mark.parametrize("zeros", ["lm_head", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_zeros_hide_no_gradient(zeros, dtype, runtime):
    """As of a new head, or an adapter: nothing in front of them has a gradient yet."""
    model = plain(tie_word_embeddings=False).to(dtype)
    wrong = model.model if zeros == "lm_head" else model.model.layers[1].mlp
    weight = model.get_submodule(zeros).weight
    with torch.no_grad():
        weight.zero_()
    SharedPrefix(model, runtime).check()
    inner = wrong.layers[0] if zeros == "lm_head" else wrong.up_proj
    forward = inner.forward
    inner.forward = lambda x, *args, **named: forward(_HalfGradient.apply(x), *args, **named)
    with pytest.raises(UnsupportedModelError, match="accepted 0.0002"):
        SharedPrefix(model, runtime).check()
    assert not weight.any() and weight.grad is None


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, float("-inf")])
def test_masked_logits_are_compared_where_they_are_not_masked(mask, runtime):
    model = plain()
    masked = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    masked[90:] = True
    model.lm_head.register_forward_hook(lambda module, args, out: out.masked_fill(masked, mask))
    SharedPrefix(model, runtime).check()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.003 * x.mean(1, keepdim=True)
    with pytest.raises(UnsupportedModelError, match=r"accepted 0.0002"):
        SharedPrefix(model, runtime).check()


def test_a_check_that_finds_no_memory_leaves_the_model(runtime, monkeypatch):
    model = plain(tie_word_embeddings=False)
    weights = dict(model.named_parameters())
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)

    def no_room(*args, **named):
        raise torch.OutOfMemoryError("of this test")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_room)
        with pytest.raises(torch.OutOfMemoryError, match="of this test"):
            SharedPrefix(model, runtime).check()
    assert all(model.get_parameter(name) is weight for name, weight in weights.items())
    assert model.lm_head.weight.grad.eq(1).all()
    SharedPrefix(model, runtime).check()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_refused(value, runtime):
    model = plain()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: _Scaled.apply(output, value)
    )
    with pytest.raises(UnsupportedModelError, match="not finite"):
        SharedPrefix(model, runtime).check()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def test_every_length_lies_inside_one_of_the_groups():
    """A behaviour that begins at some length differs between prompt rows and whole sequence."""
    lengths = miniature.lengths_up_to(miniature.Reach(1000, 0), None)
    for threshold in range(2, 1001):
        assert any(each.prompt - 1 < threshold <= each.longest - 1 for each in lengths), threshold
    assert miniature.lengths_up_to(miniature.Reach(), None) == [miniature.SHORT]


@pytest.mark.parametrize("rows", [0, 20, 38, 39, 300])
def test_every_place_in_a_microbatch_is_reached(rows):
    lengths = miniature.lengths_up_to(miniature.Reach(20, rows), None)
    assert max(each.rows for each in lengths) >= rows
    assert max(each.longest for each in lengths) < 40, "the dense run is short"


@pytest.mark.parametrize("threshold", [3, 12, 30, 77, 140])
def test_code_that_changes_at_a_length_is_refused(threshold, runtime):
    model = plain()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * (1.5 if x.shape[1] >= threshold else 1.0)
    shared = SharedPrefix(model, runtime)
    with pytest.raises(UnsupportedModelError, match="a patched forward of 'model.layers.0.mlp'"):
        shared.backward(group(threshold, (2,)), loss_fn)


def test_code_that_changes_at_a_number_of_rows(runtime):
    """No sequence is as long, but a microbatch is: responses no longer share one."""
    model = plain()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * (1.5 if x.shape[1] >= 70 else 1.0)
    shared, case = SharedPrefix(model, runtime), group(9, (4,) * 20)
    dense_backward(model, case)
    wanted = take_gradients(model)
    for tokens, way in ((40, Way.PARTS), (256, Way.ALONE)):
        checked = shared.backward(case, loss_fn, microbatch_tokens=tokens).checked
        assert checked.way is way
        assert distance(take_gradients(model), wanted) <= 2e-5


def test_a_longer_group_is_checked_anew_if_lengths_may_matter(runtime):
    model = plain()
    model.model.norm.forward = model.model.norm.forward
    shared = SharedPrefix(model, runtime)
    first = shared.backward(group(9, (4,)), loss_fn).checked
    longer = shared.backward(group(60, (4,)), loss_fn).checked
    assert longer.reason == "longer sequences" and longer.tokens >= 64 > first.tokens
    assert shared.backward(group(50, (4,)), loss_fn).checked is longer


def test_a_fingerprint_names_what_changed():
    model = plain()
    fingerprint = Fingerprint(model)
    assert fingerprint.matches() and fingerprint.difference() == "nothing changed"
    model.model.layers[1].self_attn.scaling = 0.5
    assert not fingerprint.matches()
    assert fingerprint.difference() == "model.layers.1.self_attn.scaling changed"
    ignoring = Fingerprint(model, fingerprint.volatile())
    model.model.layers[1].self_attn.scaling = 0.25
    assert ignoring.matches()
    model.model.layers[1].self_attn.head_dim = 8
    assert not ignoring.matches()
