"""Earlier turns of dialogues, and what a turn may read of them."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .. import _native as native
from ..errors import ArgumentError, DormouseError, StateError
from ..runtime import _Handle, _text

WEEK_S = 7 * 24 * 3600.0
# Most turns of one retrieval.
RETRIEVED_MAX = 1024
_TEXTS = ("query", "passage", "response")
# Room for the texts of a retrieval at first, and how often there may be too little.
_TEXTS_BYTES = 1 << 16
_ATTEMPTS_MAX = 8
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
    is the cosine of the queries' embeddings, recency exp(−age / decay). Bytes that are not UTF-8,
    which only other languages record, are replaced in its texts."""

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
        found, lengths = (native.Found * count)(), (ctypes.c_uint64 * (len(_TEXTS) * count))()
        number, texts, nbytes = ctypes.c_uint64(), (ctypes.c_char * _TEXTS_BYTES)(), ctypes.c_uint64()
        for _ in range(_ATTEMPTS_MAX):
            nbytes.value = 0
            outs = (found, lengths, count, ctypes.byref(number))
            texts_outs = (texts, len(texts), ctypes.byref(nbytes))
            arguments = (self._handle, ctypes.byref(query), *outs, *texts_outs)
            try:
                native.call("dialogue_retrieve_texts", *arguments)
                return _founds(found[: number.value], lengths, texts[: nbytes.value])
            except DormouseError:
                if nbytes.value <= len(texts):
                    raise
            # Longer turns may come before the next attempt.
            texts = (ctypes.c_char * (2 * nbytes.value))()
        raise StateError(
            f"the texts of what is retrieved grew in each of {_ATTEMPTS_MAX} attempts, to "
            f"{nbytes.value} bytes; accepted: turns that are recorded less quickly"
        )


def _founds(structs: list[native.Found], lengths: Sequence[int], texts: bytes) -> list[Found]:
    ends = [0, *itertools.accumulate(lengths)]
    cuts = itertools.pairwise(ends)
    founds = []
    for it in structs:
        own = (texts[begin:end] for begin, end in itertools.islice(cuts, len(_TEXTS)))
        read = [each.decode(errors="replace") for each in own]
        founds.append(Found(it.id, *read, it.time_s, it.weight, it.relevance, it.recency))
    return founds


def _numbers(embedding) -> torch.Tensor:
    numbers = torch.as_tensor(embedding, dtype=torch.float32).detach().cpu().contiguous()
    if numbers.dim() != 1:
        raise ArgumentError(f"embedding is {list(numbers.shape)}; accepted: [dimension]")
    return numbers
