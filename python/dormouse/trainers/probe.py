"""Whether a trainer's own log-probabilities, entropies and gradients are the shared ones, found by
computing a small batch both ways.

The shared step is checked against the model's own forward (:mod:`dormouse.hf.check`). A trainer may
do more than call it: precision contexts, temperatures, heads of its own, positions of padded rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..hf import SharedPrefix, checkpointing, sharding
from ..hf.check import undisturbed
from ..hf.dropout import NoDropout
from ..hf.trial import has_room
from .refusals import UnsupportedTrainerError

# Two prompts, the shorter one padded on the left, and responses of several lengths.
PROMPTS = (9, 9, 6, 6)
RESPONSES = (5, 2, 4, 5)

# Relative distances that rounding explains. TRL computes in FP32 whatever the model's dtype.
TOLERANCE = 1e-4
# Below FP32, or under autocast: log-probabilities and entropies, and gradients.
TOLERANCE_LOW = 0.03
TOLERANCE_LOW_GRADIENTS = 0.1

# Of a comparison in FP64: an embedding's gradient would take several GB.
BLOCK_NUMEL = 1 << 24

Values = tuple[torch.Tensor, torch.Tensor | None]
Scores = Callable[..., Values]
"""``(ids, mask, keep)``: log-probabilities and entropies, or None."""


def compare(
    model: torch.nn.Module, shared: SharedPrefix, own: Scores, ours: Scores
) -> None:
    """Compares both ways, with gradients unless they are disabled. Changes neither ``.grad`` nor
    the state of random generators.

    ``model``: the trainer's, without wrappers.

    Raises :class:`UnsupportedTrainerError`.
    """
    # Of the values too. Parameters may be elsewhere, as those of a CPUOffloadPolicy.
    device = shared.device
    has_graph = torch.is_grad_enabled()
    lowest = sharding.lowest_dtype(model)
    is_low = torch.is_autocast_enabled(device.type) or lowest.itemsize < torch.float32.itemsize
    batch = small_batch_of(model, device)
    with undisturbed(device), torch.set_grad_enabled(has_graph), NoDropout():
        with checkpointing.use(model, None):
            wanted = _computed(own, batch, model, has_graph)
        # A window of passes may wait beside: there is room for one set of gradients.
        wanted = {name: _aside(tensors) for name, tensors in wanted.items()}
        with shared.unreduced():
            got = _computed(ours, batch, model, has_graph)
    for name, value in wanted.items():
        low = TOLERANCE_LOW_GRADIENTS if name == "gradients" else TOLERANCE_LOW
        tolerance = low if is_low else TOLERANCE
        error = _distance(got[name], value)
        if not error <= tolerance:
            raise UnsupportedTrainerError(
                f"the trainer's own {name} of a small batch are at a relative distance of "
                f"{error:.2g} from those with shared prompts; accepted: {tolerance:.2g}. The rows "
                "are padded on the left, and the trainer's forward, patches and precision apply"
            )


def small_batch_of(
    model: torch.nn.Module, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns token ids, their mask and the columns that hold responses."""
    weight = model.get_input_embeddings().weight
    # A weight that DeepSpeed has partitioned is empty and has its shape beside.
    vocab = getattr(weight, "ds_shape", weight.shape)[0]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(vocab, (count,), generator=generator, device="cpu")

    keep, start = max(RESPONSES), max(PROMPTS)
    texts = {length: draw(length) for length in dict.fromkeys(PROMPTS)}
    ids = torch.zeros(len(PROMPTS), start + keep, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids[row, start - prompt : start] = texts[prompt]
        ids[row, start : start + response] = draw(response)
        mask[row, start - prompt : start + response] = 1
    return ids.to(device), mask.to(device), keep


def _computed(scores: Scores, batch, model, has_graph: bool) -> dict[str, list[torch.Tensor]]:
    """Returns tensors to be compared, by what they are."""
    logps, entropies = scores(*batch)
    mask = batch[1][:, -batch[2] :]
    found = {"log-probabilities": [logps.detach() * mask]}
    if entropies is not None:
        found["entropies"] = [entropies.detach() * mask]
    trainable = [p for p in model.parameters() if p.requires_grad]
    if has_graph and trainable:
        # Rows and columns differ, so that those that are mixed up are seen.
        weights = torch.linspace(-1, 2, logps.numel(), device=logps.device).view_as(mask) * mask
        total = (logps * weights).sum()
        if entropies is not None:
            total = total + (entropies * weights.flip(0) * mask).sum()
        gradients = torch.autograd.grad(total, trainable, allow_unused=True)
        found["gradients"] = [
            torch.zeros_like(p) if gradient is None else gradient
            for p, gradient in zip(trainable, gradients, strict=True)
        ]
    return found


def _aside(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors in host memory if their device has little room beside as many more.
    Those that are sharded stay."""
    if not all(map(_is_plain, tensors)) or has_room(tensors):
        return tensors
    return [each.cpu() for each in tensors]


def _distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Returns the relative distance of all tensors as a whole."""
    errors, norms = 0.0, 0.0
    for whole, own_whole in zip(got, wanted, strict=True):
        for ours, own in zip(_blocks(whole), _blocks(own_whole), strict=True):
            own = own.to(ours.device).double()
            errors += float((ours.double() - own).norm()) ** 2
            norms += float(own.norm()) ** 2
    return math.sqrt(errors / norms) if norms else math.sqrt(errors)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns parts of a tensor that are small in FP64; a sharded one as a whole."""
    if not _is_plain(tensor):
        return (tensor,)
    return tensor.reshape(-1).split(BLOCK_NUMEL)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether it is no DTensor."""
    return type(tensor) is torch.Tensor
