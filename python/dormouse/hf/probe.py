"""The probe: which tensors saved by phase A are used before its backward.

Phase B may read a storage that A saved: a weight cast cached by autocast, a mask kept by the model.
So may a later layer in A itself, by a skip connection over layers, and a loss, by what a hook kept.
Such an access would end the process if the storage were asleep. Therefore a miniature of the step
runs before a model's first sleeping step, under a dispatch mode that records every storage passed
to the operators of each layer and of the microbatch. A layer sleeps once the next has run: slots of
its graph never sleep if they are passed to later operators, or held by anything at the miniature's
end. The probe keeps slots, not addresses: the same graph has the same slots at any length. A layer
whose graph differs from the probed one stays awake, unless it is compiled and the probe has seen no
late read (:mod:`.compiled_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .graph import LayerGraph, SavedSlot
from .late_reads import Touches, addresses_late_for

# Tokens of the miniature: its prefix is longer or shorter than its microbatch, as in the real step,
# because the shorter one reuses a cache built for the longer one.
PROBE_LONG_TOKENS = 24
PROBE_SHORT_TOKENS = 6


class TouchRecorder(TorchDispatchMode):
    """Records the storages of tensors that operators on this thread are passed and return."""

    def __init__(self):
        super().__init__()
        self._touches = Touches()

    def take(self) -> Touches:
        """Returns what was recorded since the last call."""
        taken, self._touches = self._touches, Touches()
        return taken

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        self._touches.add(_tensors_in((args, kwargs)), _tensors_in(returned))
        return returned


def _tensors_in(values) -> list[torch.Tensor]:
    return [each for each in tree_iter(values) if isinstance(each, torch.Tensor)]


@dataclass(frozen=True)
class Probe:
    """Per layer, the graph signature and the slots that are used while the layer would sleep."""

    signatures: tuple[tuple[str, ...], ...]
    touched: tuple[frozenset[SavedSlot], ...]
    late: str | None = None
    """A late read of anything that a layer read or computed (:func:`.late_reads.late_read`)."""

    @classmethod
    def from_step(
        cls,
        graphs: Sequence[LayerGraph],
        layers: Sequence[Touches],
        after: Touches,
        late: str | None = None,
        held: Set[int] = frozenset(),
    ) -> Probe:
        """Maps touched addresses back to slots of the graphs that saved them. ``layers``: touches
        of each layer of phase A. ``after``: those of the microbatch. ``held``: addresses that may
        be read at any time."""
        slots = []
        late_for = addresses_late_for(layers, after)
        for layer, graph in enumerate(graphs):
            # What the layer below made sleeps with that one.
            own, below = late_for(layer)
            made = layers[layer].made_addresses
            slots.append(
                frozenset(
                    slot
                    for slot, address in graph.storages.items()
                    if address in held or address in (own if address in made else below)
                )
            )
        return cls(tuple(graph.signature for graph in graphs), tuple(slots), late)

    def awake(self, layer: int, graph: LayerGraph) -> set[int] | None:
        """Returns addresses of ``graph`` that must not sleep; None if it was not probed. Another
        slot, of this or another layer, may hold the same address."""
        if graph.signature != self.signatures[layer]:
            return None
        return {graph.storages[slot] for slot in self.touched[layer] if slot in graph.storages}
