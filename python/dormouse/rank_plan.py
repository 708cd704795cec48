"""Plans of ranks that the program made: :class:`RankPlan`.

``dormouse plan batch.jsonl --model NAME --ranks 4 --out DIR`` writes ``DIR/rank-0.plan``, and a
file of every other rank that has sequences. A rank loads its own and runs it without planning again.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _native as native
from .errors import ArgumentError
from .schedule import Plan

# Room for the text of a plan: what the library takes.
FILE_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class PlannedSequence:
    """A sequence of a plan; its index is the number that ops use."""

    number: int
    """Its number in the whole batch, by file and row."""
    name: int | str | None
    """What ``--id-column`` named it."""
    tokens: int
    """Number of its tokens."""
    crc32: int | None
    """CRC-32 of its token ids as little-endian 32-bit integers; None: only its length is known."""


class RankPlan:
    """The plan of one rank, from a file that ``dormouse plan --out`` wrote.

    ``rank``, ``ranks``: whose it is. ``microbatch_rows``: at most that many in a microbatch.
    ``sequences``: what it runs, as :class:`PlannedSequence`; a
    trainer finds its tokens by their ``number`` or ``name``. :meth:`plan` gives the operations,
    and ``SharedPrefix.backward(conversations, loss_fn, plan=self)`` runs them. The file has no
    token ids. A plan of a rank computes all that its sequences need: exchanges between ranks and the
    order of collectives are in ``shares.json``.

    Immutable; any thread.
    """

    def __init__(self, text: str):
        """``text``: of the whole file.

        Raises :class:`dormouse.ArgumentError` for a file that was changed or cut, is of another
        version, or has operations that no plan has.
        """
        self._text = text
        self.plan().close()
        body = json.loads(text.split("\n", 1)[1])
        self.rank: int = body["rank"]
        self.ranks: int = body["ranks"]
        self.sequences = tuple(
            PlannedSequence(it["number"], it.get("name"), it["tokens"], it.get("crc32"))
            for it in body["sequences"]
        )
        self.microbatch_rows: int = body["plan"]["microbatch_rows"]
        self._model: dict[str, int] = {
            name: body["options"]["model"][name] for name in ("layers", "kv_heads", "head_dim")
        }
        self._labels = _labels(body["plan"]["ops"], len(self.sequences))

    @classmethod
    def load(cls, path: str | os.PathLike) -> RankPlan:
        """Reads a file. Raises :class:`dormouse.ArgumentError` as the constructor, naming the file,
        and :class:`OSError` if it cannot be read."""
        size = Path(path).stat().st_size
        if size > FILE_BYTES_MAX:
            raise ArgumentError(f"{path} has {size} bytes; accepted: at most {FILE_BYTES_MAX}")
        try:
            # What is no text is damaged, which the checksum shows.
            return cls(Path(path).read_bytes().decode("utf-8", "replace"))
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from error

    def plan(self) -> Plan:
        """Returns the plan, with no operation completed. The caller closes it."""
        return Plan._load(self._text)

    def plan_for(self, model: native.ModelShape) -> Plan:
        """Returns :meth:`plan` if it was made for a model of this shape.

        Raises :class:`dormouse.ArgumentError` if layers or heads differ.
        """
        for name, planned in self._model.items():
            if getattr(model, name) != planned:
                raise ArgumentError(
                    f"the model has {name} {getattr(model, name)}; accepted: {planned}, as planned"
                )
        return self.plan()

    def labels(self, sequence: int) -> list[tuple[int, int]]:
        """Returns the labels of a sequence, as ascending half-open ranges of positions."""
        return [(begin, end) for begin, end, _ in self._labels[sequence]]

    def check(
        self,
        tokens: Sequence[torch.Tensor],
        labels: Sequence[Sequence[tuple[int, int]]],
        weights: Sequence[float],
    ) -> None:
        """Compares what a trainer is about to run with what was planned: token ids ``[tokens]``,
        labels as ascending ranges of positions, and weights, of every sequence in the plan's order.

        Raises :class:`dormouse.ArgumentError` naming the first difference.
        """
        if len(tokens) != len(self.sequences):
            raise ArgumentError(
                f"{len(tokens)} conversations; accepted: the {len(self.sequences)} of the plan, in "
                "its order"
            )
        for index, (own, ids) in enumerate(zip(self.sequences, tokens, strict=True)):
            what = f"conversation {index}, sequence {own.number} of the batch,"
            if len(ids) != own.tokens:
                raise ArgumentError(
                    f"{what} has {len(ids)} tokens; accepted: {own.tokens}, as planned"
                )
            if own.crc32 is not None and _checksum(ids) != own.crc32:
                raise ArgumentError(
                    f"{what} has other token ids than were planned; accepted: those"
                )
            planned = self._labels[index]
            given = [(begin, end, weights[index]) for begin, end in labels[index]]
            if given != planned:
                raise ArgumentError(
                    f"{what} has labels (begin, end, weight) {_shown(given)}; accepted: "
                    f"{_shown(planned)}, as planned"
                )

    def __repr__(self) -> str:
        return f"RankPlan(rank {self.rank} of {self.ranks}, {len(self.sequences)} sequences)"


def _checksum(ids: torch.Tensor) -> int:
    values = array("i", ids.tolist())
    assert values.itemsize == 4
    if sys.byteorder == "big":
        values.byteswap()
    return zlib.crc32(values)


def _labels(ops: list[dict], sequences: int) -> list[list[tuple[int, int, float]]]:
    """Returns the labels that the operations score, by sequence: ranges with their weight."""
    found: list[list[tuple[int, int, float]]] = [[] for _ in range(sequences)]
    for op in ops:
        for score in op.get("scores", ()):
            begin, rows = score["first_label"], score["rows"]
            end = begin + rows["end"] - rows["begin"]
            found[score["sequence"]].append((begin, end, score["weight"]))
    return [_joined(sorted(own)) for own in found]


def _joined(labels: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    joined: list[tuple[int, int, float]] = []
    for begin, end, weight in labels:
        if joined and joined[-1][1:] == (begin, weight):
            joined[-1] = (joined[-1][0], end, weight)
        else:
            joined.append((begin, end, weight))
    return joined


def _shown(labels: list[tuple[int, int, float]]) -> str:
    text = str(labels[:4])
    return text if len(labels) <= 4 else f"{text[:-1]}, …]"
