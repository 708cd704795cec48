"""What the prefix graph saved for backward, found by walking it.

No saved-tensor hooks: identity hooks switch autograd's version check off, and hooks would forbid
compiling the layers. Walking reads ``_saved_*`` of each node instead, which shares storage and
keeps the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

# Far above any decoder layer; a walk that passes it has left the layer it was meant for.
NODES_MAX = 20_000

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_saved_names: dict[type, tuple[str, ...]] = {}


class Place(NamedTuple):
    """Where in a layer's graph a tensor is saved: the same in every run of the same graph."""

    node: int
    attribute: str
    item: int


class LayerGraph(NamedTuple):
    """One layer's part of the prefix graph."""

    signature: tuple[str, ...]
    """Node names in walk order: equal signatures mean equal places."""
    storages: dict[Place, int]
    """Address of the storage saved at each place."""


def collect(roots: list[torch.Tensor], visited: set) -> LayerGraph:
    """Walks from ``roots`` down to nodes in ``visited`` or to leaves; adds its own to ``visited``.

    Storages of parameters are included (the caller excludes them); tensors of unknown subclasses
    and tensors that are not plain memory are left out, so they stay awake.
    """
    signature: list[str] = []
    storages: dict[Place, int] = {}
    stack = [t.grad_fn for t in reversed(roots) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        name = node.name()
        if name == _ACCUMULATE:
            continue
        index = len(signature)
        if index >= NODES_MAX:
            raise RuntimeError(f"a layer's graph has more than {NODES_MAX} nodes")
        signature.append(name)
        for attribute, item, tensor in _saved(node):
            address = storage_address(tensor)
            if address:
                storages[Place(index, attribute, item)] = address
        stack.extend(n for n, _ in reversed(node.next_functions) if n is not None)
    return LayerGraph(tuple(signature), storages)


def storage_address(tensor: torch.Tensor) -> int:
    """First address of the tensor's storage, or 0 where it is not plain CPU or GPU memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    if tensor.device.type not in ("cpu", "cuda"):
        return 0
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _saved(node) -> Iterator[tuple[str, int, torch.Tensor]]:
    for attribute in _names(type(node)):
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            # Already released, or changed in place since it was saved: autograd will say so if
            # backward needs it. It stays awake.
            continue
        items = value if isinstance(value, (tuple, list)) else (value,)
        for item, tensor in enumerate(items):
            if isinstance(tensor, torch.Tensor):
                yield attribute, item, tensor


def _names(kind: type) -> tuple[str, ...]:
    names = _saved_names.get(kind)
    if names is None:
        names = tuple(n for n in dir(kind) if n.startswith("_saved_") or n == "saved_tensors")
        _saved_names[kind] = names
    return names
