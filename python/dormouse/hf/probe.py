"""The probe microbatch: what phase B touches of what phase A saved.

A storage that A saved may still be read by B: a weight cast cached by autocast, a mask kept by the
model. Asleep, it would kill the process. So before a model's first sleeping step, a miniature of
the step runs with a dispatch mode that notes every storage the microbatch's operators are given; places
of the prefix graph found among them never sleep. Places, not addresses, are remembered: the same
graph has the same places at any length. A layer whose graph differs from the probed one stays
awake.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .graph import LayerGraph, Place, storage_address

# The miniature: a prefix longer or shorter than its microbatch, as the real step's is, because a cache
# built for the longer of the two is what the shorter one would reuse.
PROBE_LONG_TOKENS = 24
PROBE_SHORT_TOKENS = 6


class TouchRecorder(TorchDispatchMode):
    """Notes the storage address of every tensor an operator is given on this thread."""

    def __init__(self):
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.addresses.add(storage_address(value))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Probe:
    """What one miniature step found, per layer."""

    signatures: tuple[tuple[str, ...], ...]
    touched: tuple[frozenset[Place], ...]

    @classmethod
    def from_step(cls, graphs: list[LayerGraph], touched: set[int]) -> Probe:
        """Maps the touched addresses back to places of the graphs that saved them."""
        return cls(
            tuple(graph.signature for graph in graphs),
            tuple(
                frozenset(place for place, address in graph.storages.items() if address in touched)
                for graph in graphs
            ),
        )

    def may_sleep(self, layer: int, graph: LayerGraph) -> set[int] | None:
        """Addresses of ``graph`` that no microbatch touches; None where the graph is not the probed one.

        An address saved at several places may sleep only if none of them was touched.
        """
        if graph.signature != self.signatures[layer]:
            return None
        awake = {graph.storages.get(place) for place in self.touched[layer]}
        return set(graph.storages.values()) - awake
