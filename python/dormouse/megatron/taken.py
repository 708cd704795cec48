"""The batches of a call, taken from its data iterator before anything runs."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_iter

from ..trainers.refusals import UnsupportedTrainerError
from .batches import Microbatch, Read


def take(data_iterator, count: int, read: Read) -> tuple[list, list[Microbatch]]:
    """Returns the next batches of a data iterator, and what ``read`` returns of each. Of iterators
    of several chunks, which have the same batches, each advances.

    Raises :class:`StopIteration` at the end of the data, and :class:`UnsupportedTrainerError` for
    batches that change when later ones are taken: the trainer's functions read them after that.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if any(each is None for each in iterators):
        raise UnsupportedTrainerError(
            "data_iterator is None on this rank; accepted: the same batches on every rank of a "
            "model-parallel group"
        )
    batches, microbatches, before = [], [], []
    for _ in range(count):
        batch = [next(each) for each in iterators][0]
        microbatch = read(batch)
        batches.append(batch)
        microbatches.append(microbatch)
        before.append(_Contents(batch, microbatch))
    for number, contents in enumerate(before):
        if contents.changed:
            raise UnsupportedTrainerError(
                f"batch {number} of {count} changed when a later one was taken from the data "
                "iterator; accepted: batches with tensors of their own, as a call takes all of its "
                "batches before it runs any"
            )
    return batches, microbatches


class _Contents:
    """What a batch was when it was taken."""

    def __init__(self, batch, microbatch: Microbatch):
        self._batch, self._tensors = batch, _tensors_of(batch)
        self._versions = [each._version for each in self._tensors]
        # What the call reads may change by other means than torch's, and is small.
        self._copies = [(each, each.clone()) for each in microbatch]

    @property
    def changed(self) -> bool:
        """Whether it is another now."""
        tensors = _tensors_of(self._batch)
        return (
            list(map(id, tensors)) != list(map(id, self._tensors))
            or [each._version for each in tensors] != self._versions
            or not all(torch.equal(each, copy) for each, copy in self._copies)
        )


def _tensors_of(batch) -> list[torch.Tensor]:
    """Returns the tensors of a batch that count their changes."""
    leaves = filter(torch.is_tensor, tree_iter(batch))
    return [each for each in leaves if not each.is_inference()]
