"""Whether a row's values depend on the columns of padding before it.

TRL says no positions, so that most models number the columns, those of padding too. Rotary
embeddings read differences of positions, and learned ones the positions themselves. Shared prompts
begin at position 0. The comparison of a small batch (:mod:`..trainers.probe`) pads by a few
columns, and below FP32 rounding may be as large as what these change.
"""

from __future__ import annotations

import torch

from ..hf.check import undisturbed
from ..hf.dropout import NoDropout
from ..hf.sharding import lowest_dtype
from ..hf.support import logits_of
from ..trainers.refusals import UnsupportedTrainerError

TOKENS = 8
# With padding; fewer if the model has fewer positions.
COLUMNS = 64
# Relative distance that rounding explains: of what reaches the first layer in any dtype, and of
# logits in FP32, in which rotary embeddings of larger positions are off by some 1e-5.
TOLERANCE = 1e-3


def check_positions(
    model: torch.nn.Module, first_layer: torch.nn.Module, device: torch.device
) -> None:
    """Compares a row with the same one after padding, outside autocast.

    ``model``: without wrappers. ``first_layer``: of its decoder. Where weights are narrower than
    FP32, what reaches that layer alone is compared.

    Raises :class:`UnsupportedTrainerError`.
    """
    columns = getattr(model.config.get_text_config(), "max_position_embeddings", None) or COLUMNS
    padding = min(COLUMNS, columns) - TOKENS
    is_wide = lowest_dtype(model).itemsize >= torch.float32.itemsize
    outside_autocast = torch.autocast(device.type, enabled=False)
    with undisturbed(device), torch.no_grad(), NoDropout(), outside_autocast:
        near, far = (_run(model, first_layer, each, device) for each in (0, max(0, padding)))
    if any(_distance(*each) > TOLERANCE for each in zip(near[: 1 + is_wide], far, strict=False)):
        raise UnsupportedTrainerError(
            "the trainer numbers the columns of rows that are padded on the left, and the model's "
            "values depend on these numbers; accepted: positions of which attention reads "
            "differences, such as rotary embeddings, or that count the tokens of attention_mask"
        )


def _run(
    model: torch.nn.Module, first_layer: torch.nn.Module, padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what reaches the first layer, and logits, both of the tokens after ``padding``."""
    ids = torch.zeros(1, padding + TOKENS, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    ids[:, padding:], mask[:, padding:] = torch.arange(1, TOKENS + 1), 1
    found = []

    def keep(module, args, named):
        hidden = args[0] if args else named["hidden_states"]
        found.append(hidden[:, padding:].clone())

    hook = first_layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        hook.remove()
    return found[0], logits_of(output)[:, padding:]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    return float((one - other).norm() / one.norm())
