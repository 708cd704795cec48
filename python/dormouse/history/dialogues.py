"""Earlier turns of dialogues, and what a turn may read of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .. import _native as native
from ..errors import ArgumentError
from ..runtime import _Handle, _text

WEEK_S = 7 * 24 * 3600.0
# Most turns of one retrieval.
RETRIEVED_MAX = 1024
_TEXTS = ("query", "passage", "response")
_FIGURES = [name for name, _ in native.DialogueStats._fields_ if name not in ("size", "version")]


@dataclass(frozen=True)
class Turn:
    """A turn to record. ``embedding``: of the query, ``[dimension]`` finite numbers; only their
    direction counts. ``query``, ``passage``, ``response``: at most 2**20 bytes each. ``time_s``:
    seconds of a clock of the caller."""

    embedding: torch.Tensor | Sequence[float]
    query: str
    passage: str
    response: str
    time_s: float


@dataclass(frozen=True)
class Found:
    """A turn that was retrieved. ``weight``: α · ``relevance`` + (1 − α) · ``recency``; relevance
    is the cosine of the queries' embeddings, recency exp(−age / decay)."""

    id: int
    query: str
    passage: str
    response: str
    time_s: float
    weight: float
    relevance: float
    recency: float


class Dialogue(_Handle):
    """Earlier turns of dialogues, of which the best ``entries_max`` are kept. Any-thread.

    The rule is that of DH-RAG (arXiv 2502.13847). ``dimension``: numbers of an embedding.
    ``alpha``: the share of relevance in a weight, 0 to 1. ``decay_s``: seconds in which recency
    falls to 1/e. ``scanned_entries``: entries that a retrieval looks at, at least; with as many as
    there are it is exact. ``dir``: directory of the log, which one process may use at a time; turns
    that are there are loaded. ``synced``: a record waits for the disk; without it, the death of the
    machine may take the last seconds.

    A log that ends within its last record is cut there, and :meth:`torn` says so. Raises
    :class:`dormouse.ArgumentError`, :class:`dormouse.StateError` for a directory in use,
    :class:`dormouse.StorageError` for a log that is damaged elsewhere, which stays as it is.
    """

    _destroy = "dialogue_destroy"

    def __init__(
        self,
        dimension: int,
        *,
        entries_max: int = 100_000,
        alpha: float = 0.5,
        decay_s: float = WEEK_S,
        scanned_entries: int = 2048,
        dir: str | os.PathLike | None = None,
        synced: bool = True,
    ):
        for name, value in (("entries_max", entries_max), ("scanned_entries", scanned_entries)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}; accepted: 1 to {1 << 20}")
        if decay_s <= 0:
            raise ArgumentError(f"decay_s is {decay_s}; accepted: a finite number above 0")
        options = native.DialogueOptions(
            dimension=dimension,
            alpha=alpha,
            entries_max=entries_max,
            scanned_entries=scanned_entries,
            decay_s=decay_s,
            dir=None if dir is None else native.text("dir", dir),
            unsynced=not synced,
        )
        native.create(self, "dialogue_create", ctypes.byref(options))

    def record(self, turns: Iterable[Turn]) -> int:
        """Records turns in their order, all or none, at most 4096, and returns the id of the first;
        the others count up from it. Beyond ``entries_max`` the turns of the least weight for the
        last of these queries are forgotten."""
        turns = list(turns)
        structs, kept = (native.Turn * len(turns))(), []
        for struct, turn in zip(structs, turns, strict=True):
            embedding = _numbers(turn.embedding)
            struct.embedding, struct.dimension = embedding.data_ptr(), len(embedding)
            struct.time_s = turn.time_s
            texts = [getattr(turn, name).encode() for name in _TEXTS]
            for name, text in zip(_TEXTS, texts, strict=True):
                address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p)
                setattr(struct, name, native.Bytes(bytes=address, count=len(text)))
            kept.append((embedding, texts))
        first = ctypes.c_uint64()
        native.call("dialogue_record", self._handle, structs, len(structs), ctypes.byref(first))
        return first.value

    def retrieve(
        self, embedding: torch.Tensor | Sequence[float], now_s: float, count: int = 5
    ) -> list[Found]:
        """Returns at most ``count`` turns of the greatest weight at ``now_s``, the greatest first;
        of equal ones the later first. ``count``: at most 1024."""
        return self._retrieve(embedding, now_s, count, kind=0)

    def chain(
        self, embedding: torch.Tensor | Sequence[float], now_s: float, count: int = 5
    ) -> list[Found]:
        """Returns at most ``count`` turns, at most 64: the most relevant one to the query, then the
        most relevant one to both, and so on; none with a relevance below 0.4."""
        return self._retrieve(embedding, now_s, count, kind=1)

    def stats(self) -> dict[str, int]:
        """Returns figures: ``entries``, ``forgotten_entries``, ``categories``, ``summaries``,
        ``log_bytes``."""
        stats = native.DialogueStats()
        native.call("dialogue_get_stats", self._handle, ctypes.byref(stats))
        return {name: getattr(stats, name) for name in _FIGURES}

    def torn(self) -> str:
        """Returns what was cut off the end of the log when it was opened; empty if nothing was."""
        return _text("dialogue_get_torn", self._handle)

    def _retrieve(self, embedding, now_s, count, kind) -> list[Found]:
        if not 0 <= count <= RETRIEVED_MAX:
            raise ArgumentError(f"count is {count}; accepted: 0 to {RETRIEVED_MAX}")
        numbers = _numbers(embedding)
        query = native.Query(
            embedding=numbers.data_ptr(),
            dimension=len(numbers),
            now_s=now_s,
            entries_max=count,
            kind=kind,
        )
        found, number = (native.Found * count)(), ctypes.c_uint64()
        arguments = (ctypes.byref(query), found, count, ctypes.byref(number))
        native.call("dialogue_retrieve", self._handle, *arguments)
        return [self._found(struct) for struct in found[: number.value]]

    def _found(self, struct: native.Found) -> Found:
        texts = [self._text_of(struct.id, index) for index in range(len(_TEXTS))]
        return Found(
            struct.id, *texts, struct.time_s, struct.weight, struct.relevance, struct.recency
        )

    def _text_of(self, id: int, index: int) -> str:
        count = ctypes.c_uint64()
        native.call("dialogue_get_text", self._handle, id, index, None, 0, ctypes.byref(count))
        buffer = ctypes.create_string_buffer(count.value)
        arguments = (buffer, count.value, ctypes.byref(count))
        native.call("dialogue_get_text", self._handle, id, index, *arguments)
        return buffer.raw.decode()


def _numbers(embedding) -> torch.Tensor:
    numbers = torch.as_tensor(embedding, dtype=torch.float32).detach().cpu().contiguous()
    if numbers.dim() != 1:
        raise ArgumentError(f"embedding is {list(numbers.shape)}; accepted: [dimension]")
    return numbers
