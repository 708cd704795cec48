"""Blocks of K and V that pass round the ranks of a context-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..hf.ring_attention import Pair
from .lists import Message, Neighbours

# Besides the rank's own block: the one that is read and the one that arrives.
BLOCKS = 2


class ShardRing:
    """The ring of a prompt: see :class:`dormouse.hf.ring_attention.Ring`. Each rank sends to the
    next one, and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup, of_ranks: Sequence[Sequence[range]]):
        """``of_ranks``: the rows of the prompt that each rank's block has, before padding."""
        self._of_ranks, self.ranks, self._rank = of_ranks, group.size(), group.rank()
        self._neighbours = Neighbours(group)

    def rows_before(self, position: int) -> list[int]:
        """Returns how many rows of each rank's block come before a position: its first ones."""
        return [
            sum(max(0, min(each.stop, position) - each.start) for each in ranges)
            for ranges in self._of_ranks
        ]

    def visit(self, block: Pair, read: Callable[[int, Pair], None]) -> None:
        """See :meth:`dormouse.hf.ring_attention.Ring.visit`."""
        blocks = self._blocks(block)
        for hop in range(self.ranks):
            arriving = self._pass_on(blocks) if hop + 1 < self.ranks else []
            read(self._owner(hop), blocks.pair)
            if arriving:
                _wait(arriving)
                blocks.turn()

    def collect(self, block: Pair, add: Callable[[int, Pair, Pair], None]) -> Pair:
        """See :meth:`dormouse.hf.ring_attention.Ring.collect`."""
        blocks, own_sums = self._blocks(block), tuple(map(_zero_sums, block))
        sums = _Passing(own_sums, [tuple(map(torch.empty_like, own_sums))])
        for hop in range(self.ranks):
            arriving = self._pass_on(blocks) if hop + 1 < self.ranks else []
            add(self._owner(hop), blocks.pair, sums.pair)
            # The last ones come home.
            _wait([*arriving, *self._pass_on(sums)])
            if arriving:
                blocks.turn()
            sums.turn()
        return sums.pair

    def _owner(self, hop: int) -> int:
        return (self._rank - hop) % self.ranks

    def _blocks(self, own: Pair) -> _Passing:
        own = tuple(map(_tokens_first, own))
        rooms = [tuple(map(torch.empty_like, own)) for _ in range(min(BLOCKS, self.ranks - 1))]
        return _Passing(own, rooms, keeps_first=True)

    def _pass_on(self, passing: _Passing) -> list[dist.Work]:
        after, before = (self._rank + 1) % self.ranks, (self._rank - 1) % self.ranks
        sent = (Message(after, each, True) for each in passing.sent)
        received = (Message(before, each, False) for each in passing.room)
        return self._neighbours.post([*sent, *received])


class _Passing:
    """A pair that is sent on, and where the next one arrives; ``[1, tokens, heads, width]``."""

    def __init__(self, sent: Pair, rooms: list[Pair], *, keeps_first: bool = False):
        """``rooms``: for those that arrive, in turn. ``keeps_first``: none arrives in the first
        one's memory."""
        self.sent, self._rooms = sent, rooms
        self._kept = sent if keeps_first else None

    @property
    def pair(self) -> Pair:
        """The pair as attention takes it, ``[1, heads, tokens, width]``."""
        return tuple(each.transpose(1, 2) for each in self.sent)

    @property
    def room(self) -> Pair:
        """Where the next one arrives."""
        return self._rooms[0]

    def turn(self) -> None:
        """Goes on to the pair that has arrived."""
        before, self.sent = self.sent, self._rooms.pop(0)
        if before is not self._kept:
            self._rooms.append(before)


def _wait(works: list[dist.Work]) -> None:
    for each in works:
        each.wait()


def _tokens_first(block: torch.Tensor) -> torch.Tensor:
    return block.transpose(1, 2).contiguous()


def _zero_sums(block: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(block.dtype, torch.float32)
    return block.new_zeros(block.transpose(1, 2).shape, dtype=wide)
