"""Which rows of a batch keep their backward, and where rows are in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """The dimensions of a tensor that count the rows of a batch ``[sequences, columns]``."""

    row: int
    """Columns; without :attr:`batch`, sequences times columns."""
    batch: int | None = None
    """Sequences."""

    def moved(self, to: Sequence[int]) -> Layout:
        """Returns the layout after dimension d became ``to[d]``."""
        return Layout(to[self.row], None if self.batch is None else to[self.batch])


class NotByRowsError(Exception):
    """An operation joins rows, or where they are is not known."""


class Rows:
    """The kept rows of a batch.

    A *compact* tensor has these alone, one after another: a dimension of columns has as many as
    rows are kept, one of sequences has one.
    """

    def __init__(self, keep: torch.Tensor):
        """``keep``: whether each row is kept, bool ``[sequences, columns]``."""
        self.sequences, self.columns = keep.shape
        self.index = keep.flatten().nonzero().flatten()
        """Kept rows of the flattened batch, ascending."""
        self.dropped = (~keep).flatten().nonzero().flatten()
        """The others."""
        self._sequence, self._column = self.index // self.columns, self.index % self.columns

    @property
    def count(self) -> int:
        """Number of kept rows."""
        return len(self.index)

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.sequences * self.columns

    def sizes(self, sizes: Sequence[int], layout: Layout | None) -> tuple[int, ...]:
        """Returns the sizes of a compact tensor, given those of the whole one; the same without a
        layout."""
        sizes = list(sizes)
        if layout is not None:
            sizes[layout.row] = self.count
            if layout.batch is not None:
                sizes[layout.batch] = 1
        return tuple(sizes)

    def are_equal(self, a: Layout | None, b: Layout | None) -> bool:
        """Returns whether compact tensors of two layouts are the same."""
        if a is None or b is None:
            return a is b
        return a == b or (self.sequences == 1 and a.row == b.row)

    def gather(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Returns the compact copy of a tensor. Where it has one row for all, or one sequence for
        all, it is repeated."""
        row, batch = layout
        if batch is None or (self.sequences == 1 and x.shape[row] == self.columns):
            is_of_columns = x.shape[row] != self.total
            return x.index_select(row, self._column if is_of_columns else self.index)
        sizes = list(x.shape)
        sizes[row], sizes[batch] = self.columns, self.sequences
        order = [batch, row, *(d for d in range(x.dim()) if d not in layout)]
        kept = x.expand(sizes).permute(order)[self._sequence, self._column]
        return kept.unsqueeze(0).permute([order.index(d) for d in range(x.dim())])

    def scatter(self, x: torch.Tensor, layout: Layout, sizes: Sequence[int]) -> torch.Tensor:
        """Returns a tensor of ``sizes`` with the compact rows in their places, and zeros."""
        row, batch = layout
        whole = x.new_zeros(sizes)
        if batch is None or self.sequences == 1:
            return whole.index_copy_(row, self.index, x)
        order = [batch, row, *(d for d in range(x.dim()) if d not in layout)]
        whole.permute(order)[self._sequence, self._column] = x.permute(order)[0]
        return whole

    def aligned(
        self, layout: Layout, output: Sequence[int], sizes: Sequence[int]
    ) -> Layout | None:
        """Returns the layout of an operand of ``sizes`` that was broadcast to ``output``, by which
        :meth:`gather` takes its rows; None if it has one value for all rows."""
        shift = len(output) - len(sizes)
        row = layout.row - shift
        batch = None if layout.batch is None else layout.batch - shift
        has_columns = row >= 0 and sizes[row] == output[layout.row]
        if batch is None or batch < 0 or self.sequences == 1:
            return Layout(row) if has_columns else None
        has_sequences = sizes[batch] == self.sequences
        return Layout(row, batch) if has_columns or has_sequences else None

    def summed(
        self, layout: Layout, output: Sequence[int], sizes: Sequence[int]
    ) -> Layout | None:
        """Returns the layout of the gradient of such an operand; None if all rows add up."""
        own = self.aligned(layout, output, sizes)
        if own is None:
            return None
        count = sizes[own.row] * (1 if own.batch is None else sizes[own.batch])
        if count != self.total:
            raise NotByRowsError(f"an operand {list(sizes)} of {list(output)}: some rows add up")
        return own

    def viewed(self, layout: Layout, output: Sequence[int], sizes: Sequence[int]) -> Layout:
        """Returns the layout of a tensor of ``sizes`` that was viewed as ``output``."""
        row, batch = layout
        if batch is None or self.sequences == 1 or row == batch + 1:
            start = _before(output, row if batch is None or self.sequences == 1 else batch)
            for d in range(len(sizes)):
                if _before(sizes, d) != start:
                    continue
                if sizes[d] == self.total:
                    return Layout(d)
                if tuple(sizes[d : d + 2]) == (self.sequences, self.columns):
                    return Layout(d + 1, d)
        else:
            at = [
                [
                    d
                    for d in range(len(sizes))
                    if sizes[d] == count and _before(sizes, d) == _before(output, whole)
                ]
                for whole, count in ((row, self.columns), (batch, self.sequences))
            ]
            if all(at):
                return Layout(at[0][0], at[1][0])
        raise NotByRowsError(f"a view of {list(sizes)} as {list(output)}")


def _before(sizes: Sequence[int], dim: int) -> int:
    """Returns the product of the sizes before a dimension."""
    product = 1
    for size in sizes[:dim]:
        product *= size
    return product
