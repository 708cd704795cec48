"""Whether a row's values depend on the columns of padding before it.

TRL says no positions, so that most models number the columns, those of padding too. Rotary
embeddings read differences of positions, and learned ones the positions themselves. Shared prompts
begin at position 0. The comparison of a small batch (:mod:`..trainers.probe`) pads by a few
columns, and below FP32 rounding may be as large as what these change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ..hf import wide_code
from ..hf.check import undisturbed
from ..hf.dropout import NoDropout
from ..hf.sharding import lowest_dtype
from ..hf.support import ModelView, logits_of
from ..trainers.refusals import UnsupportedTrainerError

TOKENS = 8
# With padding; fewer if the model has fewer positions.
COLUMNS = 64
# Relative distance that rounding explains: of what reaches the first layer in any dtype, and of
# logits in FP32, in which rotary embeddings of larger positions are off by some 1e-5.
TOLERANCE = 1e-3
# Settings of FP32 products that round nothing to fewer bits.
EXACT_PRODUCTS = ("none", "ieee")

Read = Callable[[int, dict], torch.Tensor]
"""Runs a row after columns of padding, given its arguments; returns what its tokens have."""


class _Reached(Exception):
    """Ends a forward at the first layer: its kernels may not take the dtype outside autocast."""


def check_positions(model: torch.nn.Module, view: ModelView, device: torch.device) -> None:
    """Compares a row with the same one after padding, outside autocast.

    ``model``: without wrappers. Where weights or products are narrower than FP32, what reaches the
    first layer alone is compared.

    Raises :class:`UnsupportedTrainerError`.
    """
    columns = getattr(model.config.get_text_config(), "max_position_embeddings", None) or COLUMNS
    padding = max(0, min(COLUMNS, columns) - TOKENS)

    def reaching_layers(start: int, row: dict) -> torch.Tensor:
        hidden = _reaching(view.layers[0], lambda: model(**row))
        return hidden.narrow(_dimension_of_tokens(hidden, start + TOKENS), start, TOKENS)

    def logits(start: int, row: dict) -> torch.Tensor:
        return logits_of(model(**row))[:, start:]

    outside_autocast = torch.autocast(device.type, enabled=False)
    with undisturbed(device), torch.no_grad(), NoDropout(), outside_autocast:
        _compare(reaching_layers, padding, device)
        if lowest_dtype(model).itemsize >= torch.float32.itemsize and _has_exact_products(device):
            with wide_code.use(view):
                _compare(logits, padding, device)


def _compare(read: Read, padding: int, device: torch.device) -> None:
    near, far = (read(start, _row(start, device)).double() for start in (0, padding))
    # Not a quotient: what is no number is refused, and zeros are equal.
    if not (near - far).norm() <= TOLERANCE * near.norm():
        raise UnsupportedTrainerError(
            "the trainer numbers the columns of rows that are padded on the left, and the model's "
            "values depend on these numbers; accepted: positions of which attention reads "
            "differences, such as rotary embeddings, or that count the tokens of attention_mask"
        )


def _row(padding: int, device: torch.device) -> dict:
    ids = torch.zeros(1, padding + TOKENS, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    ids[:, padding:], mask[:, padding:] = torch.arange(1, TOKENS + 1), 1
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def _reaching(first_layer: torch.nn.Module, forward: Callable[[], object]) -> torch.Tensor:
    """Returns what a forward hands to the first layer, of which it runs nothing."""
    found = []

    def keep(module, args, named):
        found.append((args[0] if args else named["hidden_states"]).clone())
        raise _Reached

    hook = first_layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with contextlib.suppress(_Reached):
            forward()
    finally:
        hook.remove()
    return found[0]


def _dimension_of_tokens(hidden: torch.Tensor, tokens: int) -> int:
    """Returns that of ``[batch, tokens, ...]``, or of ``[streams, batch, tokens, hidden_size]``,
    which the layers of Gemma 3n read."""
    found = [each for each in (1, hidden.dim() - 2) if hidden.shape[each] == tokens]
    if not found:
        raise UnsupportedTrainerError(
            f"layers read a tensor of shape {list(hidden.shape)} for a row of {tokens} tokens; "
            "accepted: [batch, tokens, ...]"
        )
    return found[0]


def _has_exact_products(device: torch.device) -> bool:
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in EXACT_PRODUCTS
