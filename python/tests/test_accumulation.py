"""Gradients of weights that products and embeddings add to in place."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny
from test_token_scores import a_batch, dense, loss_of
from torch.utils._python_dispatch import TorchDispatchMode

import dormouse
from dormouse.hf import SharedPrefix, graph, step
from dormouse.hf.accumulation import Accumulation, accumulating, modules_of

FP64_BOUND = 1e-12
LINEARS = 4 * 7 + 1
"""Of :func:`tiny`, the head included."""
MODULES = LINEARS + 1
"""With the embedding."""
CASE = {"prompt": 9, "lengths": (4, 1, 6)}
MICROBATCHES = 2
"""Of :data:`CASE` in rows of 6."""


class Additions(TorchDispatchMode):
    """Counts products that add in place, and sums into tensors of a weight's shape."""

    def __init__(self, model):
        super().__init__()
        self._shapes = {p.shape for p in model.parameters() if p.dim() == 2}
        self.products = self.sums = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function is torch.ops.aten.addmm_.default
        is_sum = function is torch.ops.aten.add_.Tensor
        self.sums += is_sum and args[0].shape in self._shapes
        return function(*args, **(kwargs or {}))


def counted(model, shared, loss=loss_fn, **options) -> Additions:
    with Additions(model) as additions:
        shared.backward(group(**CASE), loss, microbatch_tokens=6, **options)
    return additions


def error(model, runtime, loss=loss_fn) -> tuple[float, Additions]:
    """Distance of the shared gradients from the dense ones, and how they were added up."""
    dense_backward(model, group(**CASE), loss)
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    # Checks the model.
    shared.backward(group(**CASE), loss, microbatch_tokens=6)
    model.zero_grad()
    additions = counted(model, shared, loss)
    return distance(take_gradients(model), wanted), additions


def test_microbatches_after_the_first_add_in_place(runtime):
    found, additions = error(tiny(), runtime)
    assert found <= FP64_BOUND
    assert additions.products == (MICROBATCHES - 1) * LINEARS
    # The prompt's, which end at the last layer's K and V.
    assert additions.sums == 3 * 7 + 2


@pytest.mark.parametrize("padding", [False, True])
def test_rows_of_tokens_that_repeat_are_added_up(padding, runtime):
    """Of tokens in several responses of a microbatch, in several microbatches and in the prompt."""
    case = group(**CASE)
    responses = [torch.cat([each, case.prompt[:4]]) for each in case.responses]
    repeated = dormouse.Group(case.prompt.repeat(2), responses, case.weights)
    model = tiny(pad_token_id=int(case.prompt[1]) if padding else None)
    dense_backward(model, repeated)
    wanted = take_gradients(model)
    SharedPrefix(model, runtime).backward(repeated, loss_fn, microbatch_tokens=12)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_the_passes_of_a_call_add_in_place(graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    values = dense(model, ids, mask, keep, 1.0)
    loss_of(*values, mask[:, -keep:]).backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    with Additions(model) as additions:
        scores = shared.score(
            ids, mask, keep=keep, entropy=True, graphs=graphs, microbatch_tokens=7
        )
        additions.products = 0
        loss_of(scores.log_probabilities, scores.entropies, mask[:, -keep:]).backward()
    assert distance(take_gradients(model), wanted) < 1e-10
    assert additions.products >= 2 * LINEARS


def test_gradients_that_are_there_are_added_to(runtime):
    """Of an earlier backward, and such as no product can write to."""
    model = tiny()
    before = {}
    for name, parameter in model.named_parameters():
        grad = torch.randn(parameter.shape, dtype=torch.float64)
        if grad.dim() == 2 and "q_proj" in name:
            grad = grad.T.contiguous().T
        if "o_proj" in name:
            grad.requires_grad_()
        parameter.grad = grad
        before[name] = grad.detach().clone()
    dense_backward(model, group(**CASE))
    wanted = take_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.grad = before[name].clone()
        if "q_proj" in name:
            parameter.grad = before[name].T.contiguous().T
        if "o_proj" in name:
            parameter.grad.requires_grad_()
    SharedPrefix(model, runtime).backward(group(**CASE), loss_fn, microbatch_tokens=6)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_a_gradient_by_a_weight_in_a_loss_adds_nothing(runtime):
    model = tiny(tie_word_embeddings=False)
    weights = model.lm_head.weight, model.model.layers[3].mlp.down_proj.weight

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        grads = torch.autograd.grad(value, weights, retain_graph=True)
        return value * sum(grad.norm() for grad in grads)

    found, additions = error(model, runtime, loss)
    assert found <= FP64_BOUND
    assert additions.products == (MICROBATCHES - 1) * LINEARS


def test_a_penalty_of_a_gradient_by_a_weight_is_exact(runtime):
    model = tiny(tie_word_embeddings=False)
    weight = model.lm_head.weight

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        (grad,) = torch.autograd.grad(value, weight, create_graph=True)
        return value + grad.square().sum()

    found, _ = error(model, runtime, loss)
    assert found <= FP64_BOUND


def test_checkpointed_layers_add_in_place(runtime):
    model = tiny().train()
    model.gradient_checkpointing_enable()
    found, additions = error(model, runtime)
    assert found <= FP64_BOUND
    assert additions.products == (MICROBATCHES - 1) * LINEARS


def test_autocast_keeps_autograds_sums(runtime):
    model = tiny(dtype=torch.float32)
    shared = SharedPrefix(model, runtime)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared.backward(group(**CASE), loss_fn, microbatch_tokens=6)
        assert counted(model, shared).products == 0


def test_bf16_sums_are_as_near_to_fp64(runtime, monkeypatch):
    """A product rounds once what autograd rounds twice: gradient, then sum."""
    errors = {}
    case = group(40, [8] * 24)
    truth = tiny()
    model = tiny().to(torch.bfloat16)
    truth.load_state_dict(model.state_dict())
    dense_backward(truth, case)
    wanted = take_gradients(truth)
    for is_in_place in (True, False):
        if not is_in_place:
            monkeypatch.setattr(step, "modules_of", lambda model: [])
        shared = SharedPrefix(model, runtime)
        shared.backward(case, loss_fn, microbatch_tokens=8)
        errors[is_in_place] = distance(take_gradients(model), wanted)
    assert errors[True] <= errors[False]


def test_compiled_modules_are_left_alone():
    model = tiny()
    whole = len(modules_of(model))
    assert whole == MODULES
    layers = model.model.layers
    layers[0].compile()
    layers[1].forward = torch.compile(layers[1].forward)
    layers[2].mlp = torch.compile(layers[2].mlp)
    assert len(modules_of(model)) == whole - 2 * 7 - 3
    model.lm_head.forward = lambda rows: rows
    assert len(modules_of(model)) == whole - 2 * 7 - 3 - 1


def test_a_shared_module_is_found_once():
    model = tiny()
    model.model.layers[1] = model.model.layers[0]
    assert len(modules_of(model)) == MODULES - 7


class _Kept(torch.autograd.Function):
    """Keeps a graph of its own in the forward, and takes gradients of it in the backward."""

    @staticmethod
    def forward(ctx, x, module, weight):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        ctx.weight = weight
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight = torch.autograd.grad(ctx.y, (ctx.x, ctx.weight), grad)
        return of_x, None, of_weight


def _of_energy(layer, x):
    """The gradient of a scalar by the input, through a linear module."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = layer.more(x).sin().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


WAYS = {
    "by name": lambda layer, x: layer.more(input=x),
    "a vector": lambda layer, x: x * layer.more(layer.code.sin()),
    "in place": lambda layer, x: layer.more(x).mul_(0.5),
    "vmap": lambda layer, x: torch.vmap(layer.more, in_dims=1, out_dims=1)(x),
    "func.grad": lambda layer, x: torch.func.grad(lambda z: layer.more(z).sin().sum())(x),
    "complex": lambda layer, x: layer.wide(torch.complex(x, x.flip(-1))).abs().tanh(),
    "function": lambda layer, x: _Kept.apply(x, layer.more, layer.more.weight),
    "energy": _of_energy,
}


def _calling(way, *, bias: bool = True):
    """A model whose MLPs add what a linear module of theirs returns, called in some way."""
    model = tiny()
    for layer in (each.mlp for each in model.model.layers):
        layer.more = torch.nn.Linear(96, 96, bias=bias, dtype=torch.float64)
        layer.wide = torch.nn.Linear(96, 96, dtype=torch.complex128)
        layer.code = torch.nn.Parameter(torch.randn(96, dtype=torch.float64))
        own = layer.forward

        def forward(x, own=own, layer=layer):
            return own(x) + way(layer, x)

        layer.forward = forward
    return model


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call_a_linear_module(way, runtime):
    model = _calling(WAYS[way], bias=way != "function")
    for layer in model.model.layers:
        if way != "complex":
            del layer.mlp.wide
    found, _ = error(model, runtime)
    assert found <= FP64_BOUND


def test_a_recomputed_layer_that_takes_gradients_by_its_input(runtime):
    """Its backward runs inside the step's own, and reaches no weight."""
    model = _calling(_of_energy).train()
    for layer in model.model.layers:
        del layer.mlp.wide
    options = {"use_reentrant": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    found, additions = error(model, runtime)
    assert found <= FP64_BOUND
    assert additions.products


def test_hooks_of_a_modules_operation_keep_it():
    model = tiny()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    assert len(modules_of(model)) == MODULES
    model.model.layers[0].mlp.up_proj.register_backward_hook(lambda *_: None)
    assert len(modules_of(model)) == MODULES - 1


def test_a_changed_class_keeps_its_forward(monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda module, x: x)
    model = tiny()
    assert modules_of(model) == [model.model.embed_tokens]
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda module, x: x)
    assert modules_of(model) == []


def test_embeddings_whose_rows_depend_on_more_than_their_token_are_left_alone():
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        assert modules_of(torch.nn.Embedding(3, 2, **options)) == []


def test_a_class_changed_before_dormouse_was_loaded_keeps_its_forward():
    patched = (
        "import torch; torch.nn.Linear.forward = lambda module, x: x; "
        "torch.nn.Embedding.forward = lambda module, x: x; "
        "from dormouse.hf.accumulation import modules_of; "
        "assert modules_of(torch.nn.Linear(2, 2)) == []; "
        "assert modules_of(torch.nn.Embedding(2, 2)) == []"
    )
    subprocess.run([sys.executable, "-c", patched], check=True)


def test_a_compiled_function_that_calls_linear_modules_stays_whole(runtime):
    model = tiny(num_hidden_layers=2)
    for layer in model.model.layers:
        with_compiled_gate(layer.mlp)
    dense_backward(model, group(**CASE))
    wanted = take_gradients(model)
    SharedPrefix(model, runtime).backward(group(**CASE), loss_fn, microbatch_tokens=6)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def with_compiled_gate(mlp) -> None:
    def gate(x):
        return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)

    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager", dynamic=True)
    mlp.forward = lambda x: mlp.down_proj(compiled(x))


@pytest.mark.slow
def test_a_step_in_a_compiled_function(runtime):
    model = tiny(num_hidden_layers=2)
    dense_backward(model, group(**CASE))
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    torch.compile(
        lambda: shared.backward(group(**CASE), loss_fn, microbatch_tokens=6), backend="eager"
    )()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_an_embedding_that_adds_has_the_slots_of_torchs():
    """The graph of a prompt is compared with the probed one, whose embedding is torch's."""
    model = torch.nn.Embedding(7, 3)
    tokens = torch.tensor([[1, 2, 1]])
    plain = graph.collect([model(tokens)], set())
    with accumulating(modules_of(model), Accumulation(torch.device("cpu"))).in_place():
        adding = model(tokens)
    assert adding.grad_fn.name() == "AccumulatingEmbeddingBackward"
    found = graph.collect([adding], set())
    assert found == plain
    assert tokens.data_ptr() in found.storages.values()
