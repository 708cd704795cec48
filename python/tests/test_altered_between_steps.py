"""What trainers change between two steps, or do during one.

No result is stale, and a check leaves nothing behind."""

from __future__ import annotations

import gc
import random
import threading
import types
import weakref

import numpy
import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from altered_models import HIDDEN, NOT_EXACT, WIDE, mlp, number, wrap
from models import distance, group, loss_fn, take_gradients, tiny
from test_altered_models import FP64_BOUND, dense_backward, error, hold, long_enough, small_model
from test_token_scores import a_batch
from torch import nn
from torch.nn import functional

from dormouse.hf import SharedPrefix, UnsupportedModelError

MIX = 0.1
LAST = "the last step"


def mixed(out, weight: float = MIX):
    """Adds the mean over tokens."""
    return out + weight * out.mean(1, keepdim=True)


def closure_variable(model):
    weight = 0.0
    wrap(mlp(model), lambda out, x: mixed(out, weight))
    yield NOT_EXACT
    weight = MIX


def entry_of_a_dict_in_a_closure(model):
    settings = {"inner": {"weight": 0.0}}
    wrap(mlp(model), lambda out, x: mixed(out, settings["inner"]["weight"]))
    yield NOT_EXACT
    settings["inner"]["weight"] = MIX


GLOBAL_WEIGHT = 0.0


def global_variable(model):
    global GLOBAL_WEIGHT
    wrap(mlp(model), lambda out, x: mixed(out, GLOBAL_WEIGHT))
    yield NOT_EXACT
    GLOBAL_WEIGHT = MIX
    yield
    GLOBAL_WEIGHT = 0.0


def namespace_of_settings(model):
    settings = mlp(model).settings = types.SimpleNamespace(weight=0.0)
    wrap(mlp(model), lambda out, x: mixed(out, settings.weight))
    yield NOT_EXACT
    settings.weight = MIX


class Settings:
    """An object of the trainer's own."""

    def __init__(self):
        self.weight = 0.0


def object_of_settings(model):
    settings = mlp(model).settings = Settings()
    wrap(mlp(model), lambda out, x: mixed(out, settings.weight))
    yield NOT_EXACT
    settings.weight = MIX


class Mixing:
    """A callable of the trainer's own."""

    def __init__(self):
        self.weight = 0.0

    def __call__(self, x):
        return mixed(functional.silu(x), self.weight)


def number_of_a_callable(model):
    act = Mixing()
    del mlp(model).act_fn
    mlp(model).act_fn = act
    yield NOT_EXACT
    act.weight = MIX


def variable_of_a_property(model):
    weight = 0.0
    own = property(lambda self: lambda x: mixed(functional.silu(x), weight))
    llama.LlamaMLP.act_fn = own
    try:
        yield NOT_EXACT
        weight = MIX
        yield
    finally:
        del llama.LlamaMLP.act_fn


def entry_of_a_nested_list(model):
    mlp(model).settings = [[0.0]]
    wrap(mlp(model), lambda out, x: mixed(out, mlp(model).settings[0][0]))
    yield NOT_EXACT
    mlp(model).settings[0][0] = MIX


def attribute_of_the_config(model):
    model.config.own_weight = 0.0
    wrap(mlp(model), lambda out, x: mixed(out, model.config.own_weight))
    yield NOT_EXACT
    model.config.own_weight = MIX


def hook_added_then_removed(model):
    handle = mlp(model).register_forward_hook(lambda module, args, out: mixed(out))
    handle.remove()
    yield NOT_EXACT
    handle = mlp(model).register_forward_hook(lambda module, args, out: mixed(out))
    yield None
    handle.remove()


def dropout_turned_on_and_off(model):
    mlp(model).dropout = nn.Dropout(0.0)
    wrap(mlp(model), lambda out, x: mlp(model).dropout(out))
    model.train()
    yield "dropout 0.3 in"
    mlp(model).dropout.p = 0.3
    yield None
    model.eval()
    yield "dropout 0.3 in"
    model.train()


def trainability(model):
    yield None
    model.model.layers[1].requires_grad_(False)
    yield None
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    yield None
    model.requires_grad_(True)
    yield None
    model.model.requires_grad_(False)


def trainability_turned_on_by_a_hook(model):
    """As ``enable_input_require_grads`` does."""
    model.model.embed_tokens.requires_grad_(False)
    yield None
    model.enable_input_require_grads()
    yield None
    model.disable_input_require_grads()


def implementation_of_attention(model):
    yield None
    model.set_attn_implementation("sdpa")
    yield "config.is_causal is False"
    model.config.is_causal = False
    yield None
    del model.config.is_causal


def widened_weights(model):
    model.float()
    yield None
    model.double()


def replaced_weights(model):
    yield None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    yield None
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)
    model.requires_grad_(True)
    yield None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def weights_tied_and_untied(model):
    own = model.lm_head.weight
    yield None
    model.lm_head.weight = model.model.embed_tokens.weight
    yield None
    model.lm_head.weight = own


def gradient_hook_added_and_removed(model):
    yield "has a gradient hook"
    handle = mlp(model).up_proj.weight.register_hook(lambda grad: grad * 2)
    yield None
    handle.remove()


def function_compiled(model):
    yield None
    model.model.layers[1].mlp = torch.compile(mlp(model), backend="eager")


def adapters_added_disabled_merged(model):
    yield None
    proj = model.model.layers[1].self_attn.q_proj
    proj.down, proj.up = nn.Parameter(number(HIDDEN, 4)), nn.Parameter(number(4, HIDDEN))
    inner, proj.disabled = proj.forward, False
    proj.forward = lambda x: inner(x) + (0 if proj.disabled else x @ proj.down @ proj.up)
    yield None
    proj.disabled = True
    yield None
    with torch.no_grad():
        proj.weight += (proj.down @ proj.up).T
    del proj.forward, proj.down, proj.up


EVENTS = [
    *(closure_variable, entry_of_a_dict_in_a_closure, global_variable, namespace_of_settings),
    *(number_of_a_callable, variable_of_a_property),
    *(object_of_settings, entry_of_a_nested_list, attribute_of_the_config, hook_added_then_removed),
    *(dropout_turned_on_and_off, trainability, trainability_turned_on_by_a_hook),
    *(implementation_of_attention, widened_weights, replaced_weights, weights_tied_and_untied),
    *(gradient_hook_added_and_removed, function_compiled, adapters_added_disabled_merged),
]


@pytest.mark.parametrize("events", EVENTS, ids=lambda each: each.__name__)
def test_every_step_sees_the_model_as_it_is(events, runtime):
    """Each ``yield`` names the outcome of the step after the code that follows it."""
    model = small_model()
    running = events(model)
    outcome = next(running)
    shared = SharedPrefix(model, runtime)
    shared.backward(long_enough(), loss_fn, microbatch_tokens=12)
    model.zero_grad(set_to_none=True)
    while outcome != LAST:
        following = next(running, LAST)
        hold(model, shared, outcome)
        outcome = following


@pytest.mark.parametrize("accepted", [True, False])
def test_a_check_leaves_nothing_changed(accepted, runtime):
    model = small_model()
    module = mlp(model)
    outside = nn.Parameter(number(HIDDEN, HIDDEN))
    module.runs, module.log, module.last = 0, [], None
    module.register_buffer("tokens", torch.zeros((), **WIDE))

    own = []

    def change(out, x):
        own.append(x.shape)
        module.runs += 1
        module.log.append(out)
        module.last = out
        module.tokens.add_(x.shape[1])
        out = out + 0 * (torch.rand(()) + random.random() + numpy.random.rand())
        return (out if accepted else mixed(out)) + x @ outside

    wrap(module, change)
    for parameter in (*model.parameters(), outside):
        parameter.grad = torch.randn_like(parameter)

    def state():
        tensors = [*model.named_parameters(), *model.named_buffers(), ("outside", outside)]
        values = {n: (id(t), t.clone(), None if t.grad is None else id(t.grad)) for n, t in tensors}
        hooks = [[*each._forward_hooks, *each._forward_pre_hooks] for each in model.modules()]
        numpy_state = numpy.random.get_state()[1].tolist()
        others = random.getstate(), numpy_state, model.config.to_dict()
        return values, hooks, (torch.get_rng_state(), *others)

    def grads():
        return [p.grad.clone() for p in (*model.parameters(), outside)]

    before, before_grads = state(), grads()
    shared = SharedPrefix(model, runtime)
    if accepted:
        shared.check(long_enough())
    else:
        with pytest.raises(UnsupportedModelError, match=NOT_EXACT):
            shared.check(long_enough())
    after = state()
    assert before[0].keys() == after[0].keys()
    for name, (identity, value, grad) in before[0].items():
        assert identity == after[0][name][0] and grad == after[0][name][2], name
        assert torch.equal(value, after[0][name][1]), name
    assert before[1] == after[1]
    assert torch.equal(before[2][0], after[2][0]) and before[2][1:] == after[2][1:]
    assert all(map(torch.equal, before_grads, grads()))
    assert (module.runs, module.log, module.last) == (0, [], None)
    assert own, "what a function of the trainer's holds stays"


def test_code_that_runs_in_its_own_dtype_alone(runtime):
    """Weights below FP32 are widened for the check; the refusal says so."""
    model = tiny(dtype=torch.bfloat16, num_hidden_layers=2)
    inner = mlp(model).forward
    mlp(model).forward = lambda x: inner(x.to(torch.bfloat16))
    hold(model, SharedPrefix(model, runtime), r"with weights widened to torch\.float32, fails on")


def test_an_attribute_that_every_forward_changes_needs_no_check_each_step(runtime):
    model = small_model()
    module = mlp(model)
    module.runs, module.log = 0, []

    def count(out, x):
        module.runs += 1
        module.log.append(x.shape)
        return out

    wrap(module, count)
    shared = SharedPrefix(model, runtime)
    reports = [shared.backward(long_enough(), loss_fn) for _ in range(3)]
    assert [report.checked.reason for report in reports] == ["the first step"] * 3
    assert len({id(report.checked) for report in reports}) == 1


def test_groups_beyond_max_position_embeddings_are_checked_once(runtime):
    model = small_model()
    model.config.max_position_embeddings = 32
    shared = SharedPrefix(model, runtime)
    reports = [shared.backward(long_enough(), loss_fn) for _ in range(3)]
    assert len({id(report.checked) for report in reports}) == 1
    assert reports[0].checked.tokens >= 70


def test_a_check_holds_no_activations(runtime):
    model, seen = small_model(), []
    mlp(model).register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    SharedPrefix(model, runtime).check()
    gc.collect()
    assert seen and not any(each() is not None for each in seen)


# What a loss function does.


def run_with(loss, runtime):
    model = small_model()
    assert error(model, SharedPrefix(model, runtime), loss) <= FP64_BOUND
    return model


def test_a_loss_that_differentiates_itself(runtime):
    def loss(logits, labels, i):
        (grad,) = torch.autograd.grad(loss_fn(logits, labels, i), logits, create_graph=True)
        return loss_fn(logits, labels, i) + grad.square().sum()

    run_with(loss, runtime)


@pytest.mark.parametrize("constant", [{0}, {1, 2}, {0, 1, 2, 3}])
def test_a_loss_that_is_constant(constant, runtime):
    model = small_model()
    shared = SharedPrefix(model, runtime)

    def loss(logits, labels, i):
        return torch.tensor(0.5, **WIDE) if i in constant else loss_fn(logits, labels, i)

    report = shared.backward(long_enough(), loss, microbatch_tokens=6)
    got = take_gradients(model)
    assert report.loss != 0
    dense_backward(model, long_enough(), loss)
    wanted = take_gradients(model)
    if len(constant) < 4:
        assert distance(got, wanted) <= FP64_BOUND
    else:
        assert not wanted and not any(grad.any() for grad in got.values())


@pytest.mark.parametrize("value", [0.0, None])
def test_a_loss_that_is_no_tensor(value, runtime):
    shared = SharedPrefix(small_model(), runtime)
    with pytest.raises(TypeError, match="loss_fn returned a .* for response 0; accepted: a tensor"):
        shared.backward(long_enough(), lambda *_: value)


def test_a_loss_per_token(runtime):
    def loss(logits, labels, i):
        return functional.cross_entropy(logits, labels, reduction="none")

    with pytest.raises(TypeError, match=r"a tensor of shape \[5\] for response 0"):
        SharedPrefix(small_model(), runtime).backward(long_enough(), loss)


def test_a_model_evaluated_in_the_loss_uses_its_own_attention(runtime):
    model = small_model()
    tokens = torch.arange(20)[None]
    alone = model(input_ids=tokens).logits
    seen = []

    def loss(logits, labels, i):
        with torch.no_grad():
            seen.append(torch.equal(model(input_ids=tokens).logits, alone))
        return loss_fn(logits, labels, i)

    assert error(model, SharedPrefix(model, runtime), loss) <= FP64_BOUND
    assert len(seen) == 8 and all(seen)


def test_a_model_evaluated_by_another_thread_uses_its_own_attention(runtime):
    """Meanwhile the step is inside attention."""
    model = small_model()
    tokens = torch.arange(20)[None]
    alone = model(input_ids=tokens).logits
    shared, case, seen = SharedPrefix(model, runtime), long_enough(), []
    shared.backward(case, loss_fn, microbatch_tokens=12)
    wanted = take_gradients(model)
    stepping = threading.get_ident()

    def evaluate():
        seen.append(False)
        with torch.no_grad():
            seen[-1] = torch.equal(model(input_ids=tokens).logits, alone)

    def hook(module, args, output):
        if threading.get_ident() == stepping:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    mlp(model).register_forward_hook(hook)
    shared.backward(case, loss_fn, microbatch_tokens=12)
    assert distance(take_gradients(model), wanted) == 0
    assert seen and all(seen)


def test_a_nan_that_the_check_does_not_meet_is_the_dense_one(runtime):
    """A row of the embedding that only the group reads."""
    model, case = small_model(), long_enough()
    SharedPrefix(model, runtime).check(case)
    with torch.no_grad():
        model.model.embed_tokens.weight[case.prompt[0]] = torch.nan
    shared = SharedPrefix(model, runtime)
    try:
        report = shared.backward(case, loss_fn)
    except UnsupportedModelError as refusal:
        assert "not finite" in str(refusal)
        return
    assert report.loss != report.loss
    got = take_gradients(model)
    dense_backward(model, case)
    wanted = take_gradients(model)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_a_buffer_of_equal_values_is_the_same(runtime):
    """Moving a model to another device and back replaces every buffer."""
    model, (ids, mask, keep) = small_model(), a_batch()
    shared, rotary = SharedPrefix(model, runtime), model.model.rotary_emb

    def checked():
        return shared.score(ids, mask, keep=keep).checked

    first = checked()
    for _ in range(2):
        rotary._buffers["inv_freq"] = rotary.inv_freq.clone()
        assert checked() is first
    rotary._buffers["inv_freq"] = 1.5 * rotary.inv_freq
    assert "inv_freq" in checked().reason
    rotary._buffers["inv_freq"] = rotary.inv_freq.double()
    assert "inv_freq" in checked().reason
