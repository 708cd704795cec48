"""The probe: which tensors saved by phase A are used before its backward.

Phase B may read a storage that A saved: a weight cast cached by autocast, a mask kept by the model.
So may a later layer in A itself: a skip connection over layers. Such an access would end the
process if the storage were asleep. Therefore a miniature of the step runs before a model's first
sleeping step, under a dispatch mode that records every storage passed to the operators of each
layer and of the microbatch. A layer sleeps once the next has run: slots of its graph that are
passed to later operators never sleep. The probe keeps slots, not addresses: the same graph has the
same slots at any length. A layer whose graph differs from the probed one stays awake.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .graph import LayerGraph, SavedSlot, storage_address

# Tokens of the miniature: its prefix is longer or shorter than its microbatch, as in the real step,
# because the shorter one reuses a cache built for the longer one.
PROBE_LONG_TOKENS = 24
PROBE_SHORT_TOKENS = 6


class TouchRecorder(TorchDispatchMode):
    """Records the storage address of every tensor passed to an operator on this thread."""

    def __init__(self):
        super().__init__()
        self.addresses: set[int] = set()

    def take(self) -> set[int]:
        """Returns the addresses recorded since the last call."""
        taken, self.addresses = self.addresses, set()
        return taken

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.addresses.add(storage_address(value))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Probe:
    """Per layer, the graph signature and the slots that are used while the layer would sleep."""

    signatures: tuple[tuple[str, ...], ...]
    touched: tuple[frozenset[SavedSlot], ...]

    @classmethod
    def from_step(cls, graphs: list[LayerGraph], touched: list[set[int]]) -> Probe:
        """Maps touched addresses back to slots of the graphs that saved them. ``touched``: the
        addresses touched in each layer of phase A, and last those of the microbatch."""
        slots = []
        for layer, graph in enumerate(graphs):
            later = set().union(*touched[layer + 2 :], touched[-1])
            slots.append(
                frozenset(slot for slot, address in graph.storages.items() if address in later)
            )
        return cls(tuple(graph.signature for graph in graphs), tuple(slots))

    def awake(self, layer: int, graph: LayerGraph) -> set[int] | None:
        """Returns addresses of ``graph`` that must not sleep; None if it was not probed. Another
        slot, of this or another layer, may hold the same address."""
        if graph.signature != self.signatures[layer]:
            return None
        return {graph.storages[slot] for slot in self.touched[layer] if slot in graph.storages}
