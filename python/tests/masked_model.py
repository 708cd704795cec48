"""The reference of token filtering: a plain model whose gradients are multiplied by the mask at
every layer, by hooks of tensors alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from dormouse.activations.layers import find_layers

ATTENTION = "masked_sdpa"
OWN_ATTENTION = "masked_own"
_keep: list[torch.Tensor] = []


def zeroing(keep: torch.Tensor, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that zeroes the gradients of dropped rows; ``columns``: the dimension that counts."""
    shape = [1] * (columns + 2)
    shape[0], shape[columns] = keep.shape
    return lambda grad: grad.masked_fill(~keep.view(shape), 0)


def _hooked(query, key, value) -> None:
    for tensor in (query, key, value):
        if tensor.requires_grad:
            tensor.register_hook(zeroing(_keep[-1], columns=2))


def _by_sdpa(module, query, key, value, *arguments, **options):
    _hooked(query, key, value)
    return sdpa_attention_forward(module, query, key, value, *arguments, **options)


def _by_own_code(module, query, key, value, *arguments, **options):
    """The architecture's own: with windows, sinks and soft caps. Rounds to FP32 outside
    :func:`model_zoo.in_fp64`."""
    _hooked(query, key, value)
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, *arguments, **options)


AttentionInterface.register(ATTENTION, _by_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
AttentionInterface.register(OWN_ATTENTION, _by_own_code)
AttentionMaskInterface.register(OWN_ATTENTION, eager_mask)


@contextlib.contextmanager
def masked(model, keep: torch.Tensor, layers, attention: str = ATTENTION) -> Iterator[None]:
    """Context of a forward of ``model`` whose gradients are zero in the rows that ``keep``,
    ``[sequences, columns]``, drops: at every layer's input and output, at query, key and value."""

    def hook(module, args, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(zeroing(keep, columns=1))

    def pre_hook(module, args, arguments):
        hook(module, args, args or arguments["hidden_states"])

    handles = [layer.register_forward_hook(hook) for layer in layers]
    handles += [layer.register_forward_pre_hook(pre_hook, with_kwargs=True) for layer in layers]
    config = model.config
    before, config._attn_implementation = config._attn_implementation, attention
    _keep.append(keep)
    try:
        yield
    finally:
        _keep.pop()
        config._attn_implementation = before
        for handle in handles:
            handle.remove()


def masked_backward(model, ids, keep, loss_fn, attention=ATTENTION, **arguments) -> None:
    """Adds the gradients of ``loss_fn(logits)``."""
    # peft's models pass on what they lack.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with masked(base, keep, find_layers(base), attention):
        logits = model(input_ids=ids, **arguments).logits
    if logits.requires_grad:
        logits.register_hook(zeroing(keep, columns=1))
    loss_fn(logits).backward()
