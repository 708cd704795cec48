"""Alterations that mix tokens, draw random numbers, keep state or change the backward; see
``altered_models.py``."""

from __future__ import annotations

import torch
import transformers.models.llama.modeling_llama as llama
from altered_models import HIDDEN, NOT_EXACT, WIDE, exact, mlp, refused, wrap
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.modules import module as torch_module

RANDOM = "two dense runs of the model differ by .*: it is random or keeps state"
HOOKED = "parameter '.*' has a gradient hook"


# Modules that mix tokens.


@refused(r"the first module whose output differs is model\.layers\.2\.mlp")
def a_convolution_over_tokens(model, patch):
    wrap(mlp(model, 2), lambda out, x: out + 0.3 * functional.pad(out, (0, 0, 1, 0))[:, :-1])


@refused(r"the first module whose output differs is model\.norm")
def a_norm_over_tokens(model, patch):
    wrap(model.model.norm, lambda out, x: out / (1 + x.abs().mean()))


@refused(NOT_EXACT)
def a_weak_mean_over_tokens(model, patch):
    wrap(mlp(model), lambda out, x: out + 0.002 * out.mean((0, 1), keepdim=True))


@refused(NOT_EXACT)
def the_last_token_added(model, patch):
    wrap(mlp(model, 2), lambda out, x: out + 0.1 * x[:, -1:])


@refused(NOT_EXACT)
def the_first_token_added(model, patch):
    wrap(mlp(model, 2), lambda out, x: out + 0.1 * x[:, :1])


@refused(NOT_EXACT)
def experts_of_limited_capacity(model, patch):
    def keep_half(out, x):
        kept = x[..., 0].topk(max(1, x.shape[1] // 2), 1).indices
        mask = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, kept, True)
        return out * mask.unsqueeze(-1)

    wrap(mlp(model), keep_half)


@refused(r"the first module whose output differs is model\.layers\.1 \(")
def a_hook_that_centres_a_layer(model, patch):
    model.model.layers[1].register_forward_hook(
        lambda module, args, output: output - output.mean(1, keepdim=True)
    )


@refused(NOT_EXACT)
def a_hook_that_normalises_the_decoder(model, patch):
    def hook(module, args, output):
        output.last_hidden_state = output.last_hidden_state / output.last_hidden_state.norm()
        return output

    model.model.register_forward_hook(hook)


@refused("a hook on every module")
def a_hook_on_all_modules(model, patch):
    def hook(module, args, output):
        return output + output.mean(1, keepdim=True) if isinstance(module, llama.LlamaMLP) else None

    patch.setitem(torch_module._global_forward_hooks, -1, hook)


@refused(NOT_EXACT)
def a_method_of_the_class_patched(model, patch):
    inner = llama.LlamaMLP.forward
    patch.setattr(
        llama.LlamaMLP,
        "forward",
        lambda self, x: inner(self, x) + 0.05 * x.mean(1, keepdim=True),
    )


@refused("fails on a group of random tokens: ValueError: Expected more than 1 value")
def batch_norm(model, patch):
    model.train()
    norm = nn.BatchNorm1d(HIDDEN, **WIDE)
    mlp(model).norm = norm
    wrap(mlp(model), lambda out, x: norm(out[0])[None])


@refused(NOT_EXACT)
def more_than_20_tokens(model, patch):
    wrap(mlp(model), lambda out, x: out * (1.2 if x.shape[1] > 20 else 1.0))


@refused(NOT_EXACT)
def more_than_64_tokens(model, patch):
    """The test's group is longer."""
    wrap(mlp(model), lambda out, x: out * (1.2 if x.shape[1] > 64 else 1.0))


@refused(NOT_EXACT)
def more_tokens_than_max_position_embeddings(model, patch):
    model.config.max_position_embeddings = 32
    wrap(mlp(model), lambda out, x: out * (1.2 if x.shape[1] > 40 else 1.0))


@refused(NOT_EXACT)
def the_number_of_tokens(model, patch):
    wrap(mlp(model), lambda out, x: out / x.shape[1] ** 0.5)


@exact
def the_number_of_sequences(model, patch):
    """Every pass has one row."""
    wrap(mlp(model), lambda out, x: out / (1 + x.shape[0]))


# Random numbers and state.


@refused(RANDOM)
def functional_dropout(model, patch):
    wrap(mlp(model), lambda out, x: functional.dropout(out, 0.1))


@refused(RANDOM)
def alpha_dropout(model, patch):
    mlp(model).dropout = nn.AlphaDropout(0.1).train()
    wrap(mlp(model), lambda out, x: mlp(model).dropout(out))


@refused(RANDOM)
def dropout_of_features(model, patch):
    mlp(model).dropout = nn.Dropout1d(0.1).train()
    wrap(mlp(model), lambda out, x: mlp(model).dropout(out))


@refused(RANDOM)
def dropout_in_an_evaluated_model(model, patch):
    mlp(model).dropout = nn.Dropout(0.2)
    wrap(mlp(model), lambda out, x: mlp(model).dropout(out))
    model.eval()
    mlp(model).dropout.train()


@refused(r"dropout 0\.2 in 'model\.layers\.1\.mlp\.dropout'")
def dropout_in_a_trained_model(model, patch):
    mlp(model).dropout = nn.Dropout(0.2)
    wrap(mlp(model), lambda out, x: mlp(model).dropout(out))
    model.train()


@refused(RANDOM)
def noise_on_embeddings(model, patch):
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out + torch.zeros_like(out).uniform_(-0.05, 0.05)
    )


@refused(RANDOM)
def noise_on_weights(model, patch):
    module = mlp(model).up_proj
    module.forward = lambda x: functional.linear(
        x, module.weight + 0.01 * torch.randn_like(module.weight)
    )


@refused(RANDOM)
def a_counter_in_an_attribute(model, patch):
    module = mlp(model)
    module.runs = 0

    def count(out, x):
        module.runs += 1
        return out * (1 + 0.01 * module.runs)

    wrap(module, count)


@refused(RANDOM)
def a_counter_in_a_buffer(model, patch):
    module = mlp(model)
    module.register_buffer("runs", torch.zeros((), **WIDE))

    def count(out, x):
        module.runs.add_(1)
        return out * (1 + 0.01 * module.runs)

    wrap(module, count)


@exact
def a_counter_that_nothing_reads(model, patch):
    module = mlp(model)
    module.runs, module.log = 0, []
    module.register_buffer("tokens", torch.zeros((), **WIDE))

    def count(out, x):
        module.runs += 1
        module.log.append(x.shape)
        module.tokens.add_(x.shape[1])
        return out

    wrap(module, count)


@refused(NOT_EXACT)
def the_last_output_of_the_same_shape(model, patch):
    state = {}

    def add_last(out, x):
        if "last" in state and state["last"].shape == out.shape:
            out = out + 0.01 * state["last"]
        state["last"] = out.detach()
        return out

    wrap(model.model.layers[0], add_last)


@refused("parameter '.*up_proj.weight' was written by a forward or backward")
def a_weight_written_in_forward(model, patch):
    module = mlp(model).up_proj

    def write(module, args):
        with torch.no_grad():
            module.weight.mul_(1.0)

    module.register_forward_pre_hook(write)


@refused("parameter '.*embed_tokens.weight' was written by a forward or backward")
def embeddings_renormalised_in_forward(model, patch):
    model.model.embed_tokens.max_norm = 1.0


@refused(NOT_EXACT)
def embeddings_scaled_by_frequency(model, patch):
    model.model.embed_tokens.scale_grad_by_freq = True


@refused("gradients of a dense run are not finite")
def a_weight_that_is_nan(model, patch):
    with torch.no_grad():
        mlp(model).up_proj.weight[0, 0] = torch.nan
    mlp(model).note = "weights are not compared; attributes are"


@refused("gradients of a dense run are not finite")
def a_weight_that_is_infinite(model, patch):
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    mlp(model).note = "weights are not compared; attributes are"


# Backward.


@refused(HOOKED)
def an_optimizer_in_the_backward(model, patch):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: (p.data.add_(p.grad, alpha=-0.1), setattr(p, "grad", None))
        )


@refused(HOOKED)
def gradients_clipped_by_hooks(model, patch):
    mlp(model).up_proj.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def at_the_end_of_the_graph(model):
    weight = mlp(model).up_proj.weight
    # Lives as long as this.
    weight.node = get_gradient_edge(weight).node
    return weight.node


@refused(HOOKED)
def gradients_clipped_at_the_end_of_the_graph(model, patch):
    node = at_the_end_of_the_graph(model)
    node.register_prehook(lambda grads: tuple(grad.clamp(-1e-3, 1e-3) for grad in grads))


@refused(HOOKED)
def gradients_counted_at_the_end_of_the_graph(model, patch):
    at_the_end_of_the_graph(model).register_hook(lambda *grads: None)


@exact
def a_backward_hook_that_scales(model, patch):
    mlp(model).register_full_backward_hook(lambda module, grads, out: (grads[0] * 0.5,))


@refused(NOT_EXACT)
def a_backward_hook_that_clips(model, patch):
    mlp(model).register_full_backward_hook(
        lambda module, grads, out: (grads[0].clamp(-1e-4, 1e-4),)
    )


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-9)


@exact
def a_gradient_normalised_over_tokens(model, patch):
    wrap(mlp(model, 2), lambda out, x: _Normalised.apply(out))


@refused(NOT_EXACT)
def the_first_half_detached(model, patch):
    inner = model.model.layers[2].forward

    def forward(x, *args, **named):
        half = x.shape[1] // 2
        return inner(torch.cat([x[:, :half].detach(), x[:, half:]], 1), *args, **named)

    model.model.layers[2].forward = forward
