"""What the nodes of a graph saved, and its replacement by fewer rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from .. import graph
from .rows import Layout, NotByRowsError, Rows

# Smaller tensors are freed with the graph.
HELD_BYTES_MIN = 1 << 20

_PREFIX = "_saved_"
_OF_FUNCTIONS = "saved_tensors"


class _Holder:
    """What the graph holds in the place of a saved tensor."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def restore(self) -> torch.Tensor:
        return self.tensor


class Saved:
    """Replaces saved tensors. What the graph alone held is freed."""

    def __init__(self, rows: Rows):
        self._rows = rows
        self._holders: dict[torch.autograd.graph.Node, list[_Holder]] = {}
        # A tensor that several nodes saved is gathered once. All were saved before the first
        # was freed, so that no two have one address.
        self._known: dict[tuple, torch.Tensor] = {}
        self._wanted: list[tuple] = []
        self.before: dict[int, int] = {}
        """Bytes of the storages that had rows, by address."""
        self.after: dict[int, int] = {}
        """The same after the rows were dropped."""

    def tensors(self, node) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and values of the tensors that an operation of torch saved."""
        check_no_hooks(node)
        for name in _names(type(node)):
            # Raises, as autograd does, if it was changed in place since.
            value = getattr(node, name)
            if isinstance(value, torch.Tensor):
                yield name, value

    def gather(self, node, name: str, layout: Layout | None) -> None:
        """Replaces a saved tensor by its kept rows at the next :meth:`apply`; without a layout by
        itself, so that :meth:`release` frees it."""
        check_no_hooks(node)
        self._wanted.append((node, name, None, layout, True))

    def gather_item(self, node, item: int, layout: Layout | None) -> None:
        """The same of a tensor that a :class:`torch.autograd.Function` saved."""
        check_no_hooks(node)
        self._wanted.append((node, _OF_FUNCTIONS, item, layout, True))

    def apply(self) -> None:
        """Replaces what was asked for since the last call."""
        wanted, self._wanted = self._wanted, []
        for node, name, item, layout, is_counted in wanted:
            raw = getattr(node, _raw(name))
            value = getattr(node, name)
            if item is not None:
                raw, value = raw[item], value[item]
            tensor = self._replace(node, raw, value.detach(), layout)
            if is_counted:
                _count(self.before, value)
                _count(self.after, tensor)

    def forget(self) -> None:
        """Drops what was asked for since the last :meth:`apply`."""
        self._wanted.clear()

    def _replace(self, node, raw, tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """Returns what stands for the tensor."""
        if layout is not None:
            geometry = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            key = (*geometry, layout)
            if key not in self._known:
                self._known[key] = self._rows.gather(tensor, layout)
            tensor = self._known[key]
        holder = _Holder()
        holder.tensor = tensor
        raw.register_hooks(lambda _: holder, _Holder.restore)
        self._holders.setdefault(node, []).append(holder)
        return tensor

    def hold(self, node) -> None:
        """Lets :meth:`release` free the large tensors that an operation of torch saved, as they
        are."""
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return
        try:
            for name, tensor in self.tensors(node):
                if tensor.untyped_storage().nbytes() >= HELD_BYTES_MIN and not tensor.is_leaf:
                    self._wanted.append((node, name, None, None, False))
        except NotByRowsError:
            self.forget()
        self.apply()

    def count_whole(self, node) -> None:
        """Counts what a node saved that keeps its rows. What hooks saved they hold: reading it may
        compute a layer again."""
        for _, _, tensor in () if are_by_hooks(node) else graph.saved(node):
            for counts in (self.before, self.after):
                _count(counts, tensor)

    def seal(self) -> list[torch.Tensor]:
        """Called when all is replaced. Returns the compact tensors."""
        known, self._known = self._known, {}
        return list(known.values())

    def release(self, node) -> None:
        """Frees what a node saved, after its backward."""
        for holder in self._holders.pop(node, ()):
            holder.tensor = None


def check_no_hooks(node) -> None:
    """Raises :class:`NotByRowsError` if hooks hold what a node saved."""
    if are_by_hooks(node):
        raise NotByRowsError("saved by hooks")


def are_by_hooks(node) -> bool:
    """Returns whether hooks hold what a node saved."""
    for name in _names(type(node)):
        raw = getattr(node, _raw(name))
        for each in raw if isinstance(raw, (tuple, list)) else (raw,):
            if getattr(each, "unpack_hook", None) is not None:
                return True
    return False


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """Returns the attributes in which nodes of a class save tensors."""
    names = (name for name in dir(kind) if name.startswith((_PREFIX, _OF_FUNCTIONS)))
    return tuple(name for name in names if hasattr(kind, _raw(name)))


def _raw(name: str) -> str:
    """Returns the attribute in which a tensor is as it is held."""
    return f"_raw_{name.removeprefix('_')}"


def _count(counts: dict[int, int], tensor: torch.Tensor) -> None:
    address = graph.storage_address(tensor)
    if address and not (tensor.is_leaf and tensor.requires_grad):
        counts[address] = tensor.untyped_storage().nbytes()
