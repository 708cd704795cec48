"""What a layer reads or computes that is read again while the layer would sleep.

A graph of torch's own operators saves what they need, and the probe finds the slots of it that are
read late. A compiled layer saves what torch.compile chooses, of all that the layer reads or
computes. It may sleep only if nothing of that is read late, but for what a step keeps awake anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .graph import storage_of


def storages_of(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """Returns the storages of tensors. A weak reference frees no memory later than without it, and
    no other storage equals it: addresses are used again, references are not."""
    found = (storage_of(tensor) for tensor in tensors)
    return {StorageWeakRef(storage) for storage in found if storage is not None}


@dataclass
class Touches:
    """What the operators of a part of a pass were passed, and what they returned."""

    read: set[StorageWeakRef] = field(default_factory=set)
    made: set[StorageWeakRef] = field(default_factory=set)
    """Returned, and not passed to the operator that returned it."""
    read_addresses: set[int] = field(default_factory=set)
    made_addresses: set[int] = field(default_factory=set)

    def add(self, passed: Collection[torch.Tensor], returned: Collection[torch.Tensor]) -> None:
        """Adds one operator."""
        for read, made, of in (
            (self.read, self.made, storages_of),
            (self.read_addresses, self.made_addresses, _addresses_of),
        ):
            before = of(passed)
            read |= before
            made |= of(returned) - before

    @property
    def all(self) -> set[StorageWeakRef]:
        """Storages that were read or made."""
        return self.read | self.made


def addresses_late_for(
    layers: Sequence[Touches], after: Touches
) -> Callable[[int], tuple[set[int], set[int]]]:
    """Returns a function that returns, for a layer, the addresses that are read while the layer
    sleeps, and those that are read while the layer below it sleeps."""

    def late(first: int) -> set[int]:
        return set().union(*(each.read_addresses for each in layers[first:]), after.read_addresses)

    return lambda layer: (late(layer + 2), late(layer + 1))


def still_held(layers: Sequence[Touches]) -> dict[StorageWeakRef, int]:
    """Returns the addresses of storages that layers made and that something still holds: a hook of
    the trainer, say, or a module. Called when nothing of the pass itself holds any. A tensor that
    is held with its graph holds all that the graph saved."""
    made = set().union(*(each.made for each in layers))
    if any(not each.expired() for each in made):
        # What is in a cycle of references is held by nothing.
        gc.collect()
    found = {}
    for each in made:
        storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
        if storage is not None:
            found[each] = storage.data_ptr()
    return found


def late_read(
    layers: Sequence[Touches],
    after: Touches,
    kept: Set[StorageWeakRef],
    held: Set[StorageWeakRef] = frozenset(),
) -> str | None:
    """Names a read of what a layer read or made, at a time when it would sleep; None without one.

    ``layers``: touches of each layer. ``after``: of a microbatch. ``kept``: what never sleeps.
    ``held``: what may be read at any time (:func:`still_held`).
    """
    for layer, own in enumerate(layers):
        found = own.all - kept
        for later in range(layer + 2, len(layers)):
            if not found.isdisjoint(layers[later].read):
                return f"layer {later} reads a tensor that layer {layer} read or computed"
        if not found.isdisjoint(after.read):
            return f"microbatches read a tensor that layer {layer} read or computed"
        if not found.isdisjoint(held):
            return f"something else holds a tensor that layer {layer} read or computed"
    return None


def _addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    found = (storage_of(tensor) for tensor in tensors)
    return {storage.data_ptr() for storage in found if storage is not None}
