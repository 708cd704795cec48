"""Gradient checkpointing: responses are computed again as the trainer asks, the prefix is not."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import KINDS, distance, group, loss_fn, take_gradients, tiny
from models import conversations as random_conversations
from models import dense_tree_backward, token_losses
from test_altered_models import dense_backward
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dormouse.hf import SharedPrefix

FP64_BOUND = 1e-10
LAYERS = 3
MICROBATCH_TOKENS = 10


def checkpointed(use_reentrant: bool, kind: str = "llama", **changes):
    model = tiny(kind, num_hidden_layers=LAYERS, **changes).train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def hold(model, shared, loss=loss_fn) -> None:
    case = group()
    shared.backward(case, loss, microbatch_tokens=MICROBATCH_TOKENS)
    got = take_gradients(model)
    dense_backward(model, case, loss)
    assert distance(got, take_gradients(model)) <= FP64_BOUND


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_dense_run(kind, use_reentrant, runtime):
    model = checkpointed(use_reentrant, kind)
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_in_another_thread(use_reentrant, runtime, monkeypatch):
    """As on a GPU, whose backwards run in a thread of autograd's."""
    own = torch.Tensor.backward

    def backward(*args, **named):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(own, *args, **named).result()

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    model = checkpointed(use_reentrant)
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_frozen_weights_below_trained_ones(use_reentrant, runtime):
    model = checkpointed(use_reentrant)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    hold(model, SharedPrefix(model, runtime))


def test_a_layer_in_two(runtime):
    model = tiny(num_hidden_layers=LAYERS).train()
    model.activation_checkpointing_enable(every_n_layers=2)
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("how", CheckpointImpl)
def test_layers_in_wrappers_of_torch(how, runtime):
    model = tiny(num_hidden_layers=LAYERS)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=how)
    hold(model, SharedPrefix(model, runtime))


def test_products_kept(runtime):
    """Only what is not a product is computed again."""
    kept = [torch.ops.aten.mm.default]
    model = tiny(num_hidden_layers=LAYERS).train()
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    hold(model, SharedPrefix(model, runtime))


def test_activations_kept_on_the_host(runtime):
    model = tiny(num_hidden_layers=LAYERS).train()
    model.activation_checkpointing_enable(offload=True)
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_responses_run_twice_and_the_prompt_once(use_reentrant, runtime):
    model, case = checkpointed(use_reentrant), group()
    shared = SharedPrefix(model, runtime)
    rows = []
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    shared.backward(case, loss_fn, microbatch_tokens=MICROBATCH_TOKENS)
    rows.clear()
    report = shared.backward(case, loss_fn, microbatch_tokens=MICROBATCH_TOKENS)
    assert rows[0] == report.counts["prefix_tokens"] == len(case.prompt) - 1
    assert sum(rows[1:]) == 2 * report.counts["microbatch_tokens"]
    assert report.counts["microbatches"] > 1


def test_the_prefix_sleeps(runtime):
    model = checkpointed(False)
    report = SharedPrefix(model, runtime).backward(group(200), loss_fn)
    plain = tiny(num_hidden_layers=LAYERS).train()
    expected = SharedPrefix(plain, runtime).backward(group(200), loss_fn)
    assert report.notes == []
    assert report.prefix["dormant_bytes"] == expected.prefix["dormant_bytes"] > 0


def calling(model):
    """Returns a loss that calls the model."""

    def loss(logits, labels, i):
        tokens = labels.new_tensor([[3, 1, 4, 1, 5]])
        other = model(input_ids=tokens, use_cache=False).logits
        return loss_fn(logits, labels, i) + other[0, :, i].sum()

    return loss


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_calls_the_checkpointed_model(use_reentrant, runtime):
    """Its layers are computed again in the same backward, with the model's own attention."""
    model = checkpointed(use_reentrant)
    hold(model, SharedPrefix(model, runtime), calling(model))


def test_the_model_is_as_before_after_an_error(runtime):
    model = checkpointed(False)
    shared = SharedPrefix(model, runtime)
    hold(model, shared)
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]

    def failing(logits, labels, i):
        raise KeyError("the loss")

    with pytest.raises(KeyError, match="the loss"):
        shared.backward(group(), failing)
    assert functions == [layer._gradient_checkpointing_func for layer in model.model.layers]
    model.zero_grad(set_to_none=True)
    hold(model, shared)


def test_switched_on_between_steps(runtime):
    model = tiny(num_hidden_layers=LAYERS).train()
    shared = SharedPrefix(model, runtime)
    hold(model, shared)
    model.activation_checkpointing_enable()
    hold(model, shared)
    model.activation_checkpointing_disable()
    hold(model, shared)


def test_autocast(runtime):
    """Weights cast for autocast live through a step: they are not computed again."""
    model, case = checkpointed(False, dtype=torch.float32), group()
    shared = SharedPrefix(model, runtime)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared.backward(case, loss_fn, microbatch_tokens=MICROBATCH_TOKENS)
    got = take_gradients(model)
    model.activation_checkpointing_disable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=MICROBATCH_TOKENS)
    assert distance(got, take_gradients(model)) <= 1e-6


def by_hand(module, use_reentrant: bool) -> None:
    """As a trainer's own forward checkpoints a module."""
    forward = module.forward

    def checkpointed(hidden, *args, **named):
        def run(hidden):
            return forward(hidden, *args, **named)

        return checkpoint(run, hidden, use_reentrant=use_reentrant)

    module.forward = checkpointed


def hand_made(use_reentrant: bool, part: str = "", **changes):
    model = tiny(num_hidden_layers=LAYERS, **changes).train()
    model.enable_input_require_grads()
    for layer in model.model.layers:
        by_hand(layer.get_submodule(part), use_reentrant)
    return model


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("part", ["", "mlp"])
def test_torchs_function_called_by_hand(part, use_reentrant, runtime):
    model = hand_made(use_reentrant, part)
    shared = SharedPrefix(model, runtime)
    hold(model, shared)
    assert not shared.backward(group(200), loss_fn).notes
    model.zero_grad(set_to_none=True)
    case = random_conversations(1)
    shared.backward(case, token_losses, microbatch_tokens=9, block_tokens=6)
    got = take_gradients(model)
    dense_tree_backward(model, case)
    assert distance(got, take_gradients(model)) <= FP64_BOUND


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_torchs_function_in_checkpointed_layers(outer, inner, runtime, monkeypatch):
    """The inner part is computed again twice, in a thread of autograd's."""
    own = torch.Tensor.backward

    def backward(*args, **named):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(own, *args, **named).result()

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    model = hand_made(inner, "mlp")
    model.activation_checkpointing_enable({"use_reentrant": outer})
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_function_around_dropout(use_reentrant, runtime):
    """Its check compares with fixed masks, which a part that is computed again meets again."""
    model = tiny(num_hidden_layers=LAYERS).train()
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.3))
        by_hand(layer, use_reentrant)
    report = SharedPrefix(model, runtime, prompt_dropout=False).backward(group(), loss_fn)
    assert report.checked.error <= FP64_BOUND


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_function_around_a_layer_that_reads_a_cache(use_reentrant, runtime):
    with in_fp64():
        model = zoo_model("bloom").train()
        model.enable_input_require_grads()
        for layer in model.transformer.h:
            by_hand(layer, use_reentrant)
        hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_calls_a_model_checkpointed_by_hand(use_reentrant, runtime):
    model = hand_made(use_reentrant)
    hold(model, SharedPrefix(model, runtime), calling(model))


def test_another_thread_checkpoints_meanwhile(runtime):
    """Its own function is computed again."""
    names = dict(vars(torch_checkpoint))
    model, runs = hand_made(True, "mlp"), []

    def square(x):
        runs.append(None)
        return x * x

    def elsewhere():
        for use_reentrant in (False, True):
            x = torch.ones(3, requires_grad=True)
            checkpoint(square, x, use_reentrant=use_reentrant).sum().backward()
            assert x.grad.tolist() == [2, 2, 2]

    def hook(module, args):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(elsewhere).result()

    model.model.layers[1].mlp.register_forward_pre_hook(hook)
    hold(model, SharedPrefix(model, runtime))
    assert len(runs) >= 4 and len(runs) % 4 == 0
    assert all(vars(torch_checkpoint)[name] is value for name, value in names.items())
