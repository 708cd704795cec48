"""Alterations of a model that trainers make in its modules, and whether a shared step stays exact.

Each function alters the model in place; ``patch`` undoes what it changes outside the model. The
decorator states the outcome: :func:`exact`, or :func:`refused` with a pattern of the refusal.
``altered_tokens.py`` has those that mix tokens, draw random numbers or keep state,
``altered_attention.py`` those of attention, positions and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers.models.llama.modeling_llama as llama
from models import VOCAB
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HIDDEN = 96
WIDE = {"dtype": torch.float64}

NOT_EXACT = "a shared step is not exact for this model: .* differs from the dense run by "


class Case(NamedTuple):
    """An alteration and its outcome."""

    alter: Callable
    refusal: str | None
    """A pattern of the refusal; None: the step is exact."""


CASES: dict[str, Case] = {}


def exact(alter: Callable) -> Callable:
    """The step of the altered model is exact."""
    CASES[alter.__name__] = Case(alter, None)
    return alter


def refused(pattern: str) -> Callable[[Callable], Callable]:
    """The step of the altered model is refused with ``pattern``."""

    def register(alter: Callable) -> Callable:
        CASES[alter.__name__] = Case(alter, pattern)
        return alter

    return register


def wrap(module: nn.Module, change: Callable) -> None:
    """Makes ``module(x, ...)`` return ``change(output, x)``."""
    inner = module.forward
    module.forward = lambda x, *args, **named: change(inner(x, *args, **named), x)


def mlp(model, layer: int = 1) -> nn.Module:
    return model.model.layers[layer].mlp


def number(*shape, scale: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return scale * torch.randn(*shape, generator=generator, **WIDE)


# The model's output.


def change_logits(model, change: Callable) -> None:
    def hook(module, args, output):
        output.logits = change(output.logits)
        return output

    model.register_forward_hook(hook)


@exact
def logits_scaled_by_a_patched_forward(model, patch):
    inner = model.forward

    def forward(*args, **named):
        output = inner(*args, **named)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward


@exact
def logits_scaled_by_a_hook(model, patch):
    change_logits(model, lambda logits: logits * 2)


@exact
def logits_capped_by_a_subclass(model, patch):
    class Capped(llama.LlamaForCausalLM):
        def forward(self, *args, **named):
            output = super().forward(*args, **named)
            output.logits = torch.tanh(output.logits)
            return output

    model.__class__ = Capped


@refused(NOT_EXACT)
def logits_summed_by_a_subclass(model, patch):
    class Summed(llama.LlamaForCausalLM):
        def forward(self, *args, **named):
            output = super().forward(*args, **named)
            output.logits = output.logits + 0.1 * output.logits.cumsum(1)
            return output

    model.__class__ = Summed


@exact
def logits_masked_with_an_infinity(model, patch):
    """Part of the vocabulary is padding. The test's labels are below it."""
    padding = torch.tensor([VOCAB - 2, VOCAB - 1])
    change_logits(model, lambda logits: logits.index_fill(-1, padding, -torch.inf))


@refused(NOT_EXACT)
def logits_centred_over_tokens(model, patch):
    change_logits(model, lambda logits: logits - logits.mean(1, keepdim=True))


@refused(NOT_EXACT)
def logits_summed_over_tokens(model, patch):
    change_logits(model, lambda logits: logits + 0.1 * logits.cumsum(1))


@refused(NOT_EXACT)
def logits_shifted(model, patch):
    change_logits(model, lambda logits: logits + torch.roll(logits, 1, 1))


@refused("the model returns logits of 1 of .* tokens; accepted: of every token")
def logits_of_the_last_token_alone(model, patch):
    inner = model.forward
    model.forward = lambda *args, **named: inner(*args, logits_to_keep=1, **named)


@refused("the model's own forward fails .* 'tuple' object has no attribute")
def outputs_as_tuples(model, patch):
    model.config.return_dict = False


@exact
def hidden_states_returned_too(model, patch):
    model.config.output_hidden_states = True


@exact
def head_swapped(model, patch):
    model.set_output_embeddings(nn.Linear(HIDDEN, VOCAB, **WIDE))


@exact
def embeddings_resized(model, patch):
    model.resize_token_embeddings(VOCAB + 7)


@exact
def embeddings_tied(model, patch):
    model.lm_head.weight = model.model.embed_tokens.weight


@exact
def value_head(model, patch):
    model.value_head = nn.Linear(HIDDEN, 1, **WIDE)
    model.model.register_forward_hook(
        lambda module, args, output: output.__setitem__(
            "value", model.value_head(output.last_hidden_state)
        )
    )


@exact
def as_many_heads_as_layers(model, patch):
    layers = len(model.model.layers)
    model.heads = nn.ModuleList(nn.Linear(HIDDEN, VOCAB, **WIDE) for _ in range(layers))
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: inner(x) + sum(head(x) for head in model.heads)


@refused(NOT_EXACT)
def head_with_a_bias_by_row(model, patch):
    def change(logits, x):
        rows = torch.arange(x.shape[1], **WIDE)
        return logits + 0.01 * rows[:, None] * torch.arange(VOCAB, **WIDE)

    wrap(model.lm_head, change)


# Layers: which run, how often, with which weights.


@exact
def layers_reversed(model, patch):
    model.model.layers = nn.ModuleList(list(model.model.layers)[::-1])


@refused("layer 1 .* runs no attention through transformers' AttentionInterface")
def a_layer_that_does_nothing(model, patch):
    model.model.layers[1].forward = lambda x, *args, **named: x


@refused("layer 2 runs after 1 layers")
def a_layer_used_twice(model, patch):
    model.model.layers[2] = model.model.layers[1]


@refused("more than once in a layer")
def a_layer_run_twice(model, patch):
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda x, *a, **named: inner(inner(x, *a, **named), *a, **named)


@refused("runs attention that did not run once over the prompt")
def a_decoder_run_twice(model, patch):
    inner = model.model.forward

    def forward(*args, **named):
        named["inputs_embeds"] = inner(*args, **named).last_hidden_state
        named.pop("input_ids", None)
        return inner(**named)

    model.model.forward = forward


@refused("has no list of 3 layers")
def a_layer_removed(model, patch):
    model.model.layers = model.model.layers[:2]


@exact
def a_layer_removed_with_its_config(model, patch):
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


@exact
def layers_that_return_tuples(model, patch):
    for layer in model.model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner, **named: (inner(x, **named), x)
        layer.register_forward_hook(lambda module, args, output: output)

    def first(module, args):
        return (args[0][0] if isinstance(args[0], tuple) else args[0], *args[1:])

    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(first)


@exact
def a_skip_connection_over_layers(model, patch):
    layers, kept = model.model.layers, []
    layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    layers[2].register_forward_pre_hook(lambda module, args: (args[0] * kept.pop(),))


@exact
def weights_shared_by_two_layers(model, patch):
    mlp(model, 2).up_proj.weight = mlp(model, 1).up_proj.weight


@exact
def a_weight_used_by_another_layer_too(model, patch):
    weight = mlp(model, 0).up_proj.weight
    wrap(mlp(model, 1), lambda out, x: out + functional.linear(x, weight.T @ weight))


@exact
def a_parameter_kept_in_a_list(model, patch):
    module = mlp(model)
    module.kept = [module.up_proj.weight]
    wrap(module, lambda out, x: out + functional.linear(x, module.kept[0].T @ module.kept[0]))


@exact
def a_parameter_with_attributes(model, patch):
    module = mlp(model)
    module.up_proj.weight.factor = 1.5
    wrap(module, lambda out, x: out * module.up_proj.weight.factor)


@exact
def a_parameter_outside_the_model(model, patch):
    outside = nn.Parameter(number(HIDDEN, HIDDEN))
    wrap(mlp(model), lambda out, x: out + x @ outside)


@exact
def low_rank_adapters(model, patch):
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            module.weight.requires_grad_(False)
            module.down = nn.Parameter(number(module.in_features, 4))
            module.up = nn.Parameter(number(4, module.out_features))
            wrap(module, lambda out, x, own=module: out + x @ own.down @ own.up)


@exact
def a_frozen_layer(model, patch):
    model.model.layers[1].requires_grad_(False)


@exact
def everything_frozen_but_the_head(model, patch):
    model.model.requires_grad_(False)


@refused("no parameter of the model and no loss require grad")
def everything_frozen(model, patch):
    model.requires_grad_(False)


@exact
def weights_replaced_and_doubled(model, patch):
    model.float()
    model.double()


@exact
def evaluating(model, patch):
    model.eval()


@refused(r"parameters in torch\.float8_e4m3fn are not supported")
def eight_bits(model, patch):
    model.to(torch.float8_e4m3fn)


@exact
def checkpointing_of_transformers(model, patch):
    model.train()
    model.activation_checkpointing_enable()


@exact
def reentrant_checkpointing_of_transformers(model, patch):
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": True})


@refused("the model's own forward fails .*_gradient_checkpointing_func")
def checkpointing_without_a_function(model, patch):
    model.train()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True


@exact
def checkpointed_mlps(model, patch):
    for layer in model.model.layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)


@exact
def checkpointed_layers(model, patch):
    for layer in model.model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner, **named: checkpoint(
            inner, x, use_reentrant=False, **named
        )


@exact
def reentrant_checkpointed_mlps(model, patch):
    for layer in model.model.layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=True)


@exact
def a_layer_without_gradients(model, patch):
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = torch.no_grad()(lambda *args, **named: inner(*args, **named))


@exact
def a_compiled_layer(model, patch):
    model.model.layers[1].mlp.compile(backend="aot_eager")
