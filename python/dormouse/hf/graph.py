"""Finds the tensors that the prefix graph saved for backward, by walking the graph.

No saved-tensor hooks: identity hooks switch autograd's version check off, and hooks would forbid
compiling the layers. Walking reads ``_saved_*`` of each node instead, which shares storage and
keeps the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

DTensor: type | None = None
if dist.is_available():
    from torch.distributed.tensor import DTensor

# Far above a decoder layer without a loop over tokens: a walk that exceeds it has left the layer.
NODES_MAX = 20_000


class GraphTooLargeError(RuntimeError):
    """A layer's graph has more than NODES_MAX nodes."""


# Views between an output and the operation that computed its memory.
_VIEWS_MAX = 16
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        *(("Alias", 0), ("AsStrided", 0), ("Diagonal", 0), ("Expand", 0), ("Permute", 0)),
        *(("ReshapeAlias", 0), ("Select", 0), ("Slice", 0), ("Unfold", 0)),
        # torch's overloads: of no dimension, of one, of several.
        *(("Squeeze", 0), ("Squeeze", 1), ("Squeeze", 2)),
        *(("Transpose", 0), ("T", 0), ("UnsafeView", 0), ("Unsqueeze", 0), ("View", 0)),
    )
)
# Attributes in which operations save what they return, and those of torch.autograd.Function.
_OUTPUTS = ("_saved_result", "_saved_output", "saved_tensors")

_DEFAULT = torch._C._autograd.CreationMeta.DEFAULT
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# Nodes that stand for others of a probed graph. torch reshapes by another node while a dispatch mode
# is active, as in the probe; neither saves a tensor. A graph may end where tokens are embedded, or
# add to the gradient of the embedding.
_EQUAL = {
    "ReshapeAliasBackward0": "ViewBackward0",
    **dict.fromkeys(("EmbeddedBackward", "AccumulatingEmbeddingBackward"), "EmbeddingBackward0"),
}
# What the latter saves has the name that torch's operation gives it.
_EQUAL_SAVED = {("AccumulatingEmbeddingBackward", "saved_tensors"): "_saved_indices"}
_saved_names: dict[type, tuple[str, ...]] = {}


class SavedSlot(NamedTuple):
    """Position of a saved tensor in a layer's graph: the same in every run of the same graph."""

    node: int
    attribute: str
    item: int


class LayerGraph(NamedTuple):
    """One layer's part of the prefix graph."""

    signature: tuple[str, ...]
    """Node names in walk order: equal signatures have equal slots."""
    storages: dict[SavedSlot, int]
    """Address of the storage saved in each slot."""


def collect(roots: list[torch.Tensor], visited: set) -> LayerGraph:
    """Walks from ``roots`` to leaves or to nodes in ``visited``, and adds its nodes to ``visited``.

    Storages of parameters are included (the caller excludes them); tensors of unknown subclasses
    and tensors that are not plain memory are left out, so they stay awake.
    """
    signature: list[str] = []
    storages: dict[SavedSlot, int] = {}
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
            raise GraphTooLargeError(f"its graph has more than {NODES_MAX} nodes")
        signature.append(_EQUAL.get(name, name))
        for attribute, item, tensor in saved(node):
            address = storage_address(tensor)
            if address:
                attribute = _EQUAL_SAVED.get((name, attribute), attribute)
                storages[SavedSlot(index, attribute, item)] = address
        stack.extend(n for n, _ in reversed(node.next_functions) if n is not None)
    return LayerGraph(tuple(signature), storages)


def leaves(output: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaves that receive a gradient from the backward of ``output``."""
    found: list[torch.Tensor] = []
    seen: set = set()
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _ACCUMULATE:
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def older(output: torch.Tensor, than: torch.Tensor) -> str | None:
    """Returns the name of an operation that ran before the one that computed ``than``, gets a
    gradient from the backward of ``output`` and has saved a tensor for it; None without one."""
    limit, stack, seen = than.grad_fn._sequence_nr(), [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == _ACCUMULATE:
            continue
        if node._sequence_nr() < limit and any(saved(node)):
            return _EQUAL.get(name, name)
        stack.extend(following for following, _ in node.next_functions)
    return None


def saves(output: torch.Tensor) -> bool:
    """Returns whether the operation that computed ``output``, perhaps behind views, saved it.

    Reads nothing else that was saved: in a checkpointed part that would compute it again.
    """
    node = output.grad_fn
    for _ in range(_VIEWS_MAX):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]
    if node is None:
        return False
    address = storage_address(output)
    names = [name for name in _names(type(node)) if name.startswith(_OUTPUTS)]
    return any(storage_address(tensor) == address for _, _, tensor in saved(node, names))


def is_overwritable(output: torch.Tensor) -> bool:
    """Returns whether the values of ``output`` may be overwritten before its backward: that does not
    read them, and autograd does not forbid it, as of views that a custom function returned."""
    created = torch._C._autograd._get_creation_meta(output) if output._is_view() else _DEFAULT
    return created == _DEFAULT and not saves(output)


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's storage (:func:`storage_of`), or 0 if it has none."""
    storage = storage_of(tensor)
    return 0 if storage is None else storage.data_ptr()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the tensor's storage, of a DTensor that of this rank's part, or None if it is not
    plain CPU or GPU memory."""
    if type(tensor) is DTensor:
        tensor = tensor._local_tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    if tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()


def saved(
    node, names: Iterable[str] | None = None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields what a node saved. ``names``: of the attributes; None: all."""
    for attribute in _names(type(node)) if names is None else names:
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            # Released, or changed in place since the save: autograd raises if backward needs it.
            # It stays awake.
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
