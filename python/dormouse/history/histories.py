"""Responses of earlier epochs, by prompt."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import _native as native
from ..errors import ArgumentError, DormouseError
from ..runtime import _Handle, _text
from ..token_ids import ids_of

if TYPE_CHECKING:
    from .drafters import Drafter

WEIGHINGS = {"reward": 0, "count": 1}
BUDGET_BYTES = 1 << 30
_FIGURES = [name for name, _ in native.HistoryStats._fields_ if name not in ("size", "version")]


@dataclass(frozen=True)
class Rollout:
    """A response to record. ``prompt``, ``response``: token ids, a 1-D integer tensor, array or list.
    ``reward``: a finite number; rewards are compared within a prompt alone. ``epoch``: 0 or more."""

    prompt: torch.Tensor | Sequence[int]
    response: torch.Tensor | Sequence[int]
    reward: float = 0.0
    epoch: int = 0


class History(_Handle):
    """Responses of earlier epochs, by prompt. Any-thread.

    ``vocab``: token ids are below it. ``epochs_kept``: epochs of a prompt whose responses are kept,
    the latest included. ``budget_bytes``: memory that prompts may take, at 8 to 9 bytes a token;
    beyond it the least recently used ones go into the file of cold prompts, or are forgotten.
    ``weighing``: ``"reward"``, an occurrence weighs by its response's reward and epoch, or
    ``"count"``. ``dir``: directory of the saved history, which one process may use at a time; a
    history that is there is loaded. ``cold_bytes``: size of the file of cold prompts, in ``dir``; 0
    for none.

    Raises :class:`dormouse.ArgumentError`, :class:`dormouse.StateError` for a directory in use,
    :class:`dormouse.StorageError` for a saved history that is damaged, which stays as it is.
    """

    _destroy = "history_destroy"

    def __init__(
        self,
        vocab: int,
        *,
        epochs_kept: int = 2,
        budget_bytes: int = BUDGET_BYTES,
        weighing: str = "reward",
        dir: str | os.PathLike | None = None,
        cold_bytes: int = 0,
    ):
        if weighing not in WEIGHINGS:
            raise ArgumentError(f"weighing is {weighing!r}; accepted: {', '.join(WEIGHINGS)}")
        if epochs_kept < 1:
            raise ArgumentError(f"epochs_kept is {epochs_kept}; accepted: 1 to 64")
        options = native.HistoryOptions(
            vocab=vocab,
            epochs_kept=epochs_kept,
            budget_bytes=budget_bytes,
            weighing=WEIGHINGS[weighing],
            dir=None if dir is None else native.text("dir", dir),
            cold_bytes=cold_bytes,
        )
        self.vocab = vocab
        native.create(self, "history_create", ctypes.byref(options))

    def record(
        self,
        prompt: torch.Tensor | Sequence[int],
        response: torch.Tensor | Sequence[int],
        reward: float = 0.0,
        epoch: int = 0,
    ) -> None:
        """Records a response; arguments are those of :class:`Rollout`. The first of a later epoch
        forgets the prompt's responses of epochs that are no longer kept."""
        self.record_all([Rollout(prompt, response, reward, epoch)])

    def record_all(self, rollouts: Iterable[Rollout]) -> None:
        """Records responses in their order. Those before one that the history refuses are recorded:
        an id, a reward or an epoch that it does not accept; the error says which one. If one has
        another type or shape, or an epoch that is not a number of 32 bits, none is."""
        rollouts = list(rollouts)
        structs, kept = (native.Rollout * len(rollouts))(), []
        for struct, rollout in zip(structs, rollouts, strict=True):
            for name in ("prompt", "response"):
                tokens, owner = tokens_of(getattr(rollout, name))
                setattr(struct, name, tokens)
                kept.append(owner)
            struct.reward = rollout.reward
            if not 0 <= rollout.epoch < 1 << 32:
                raise ArgumentError(f"epoch is {rollout.epoch}; accepted: 0 to {(1 << 32) - 1}")
            struct.epoch = rollout.epoch
        recorded = ctypes.c_uint64()
        arguments = (structs, len(structs), ctypes.byref(recorded))
        try:
            native.call("history_record", self._handle, *arguments)
        except DormouseError as e:
            if len(structs) < 2:
                raise
            raise type(e)(f"rollout {recorded.value}: {e}", e.status) from None

    def drafter(self, prompt: torch.Tensor | Sequence[int]) -> Drafter:
        """Returns what drafts one response to a prompt. ``prompt``: its token ids."""
        from .drafters import Drafter

        return Drafter(self, prompt)

    def save(self) -> None:
        """Saves everything into the directory, in the place of what is there, as a whole or not at
        all. Raises :class:`dormouse.StateError` without a directory,
        :class:`dormouse.StorageError`."""
        native.call("history_save", self._handle)

    def release(self, nbytes: int = 0) -> None:
        """Moves the least recently used prompts out of memory until ``nbytes`` are in use, once."""
        native.call("history_release", self._handle, nbytes)

    def stats(self) -> dict[str, int]:
        """Returns figures: ``prompts``, ``tokens`` and ``bytes`` in memory, ``cold_prompts``,
        ``cold_bytes``, ``forgotten_prompts``, ``drafted_tokens``, ``accepted_tokens``."""
        stats = native.HistoryStats()
        native.call("history_get_stats", self._handle, ctypes.byref(stats))
        return {name: getattr(stats, name) for name in _FIGURES}

    def failure(self) -> str:
        """Returns the reason that the file of cold prompts last failed; empty if it never did."""
        return _text("history_get_failure", self._handle)


def tokens_of(ids) -> tuple[native.Tokens, object]:
    """Returns token ids as the library reads them, and what keeps them alive."""
    if len(ids) == 0:
        return native.Tokens(id_bytes=4), None
    address, id_bytes, count, owner = ids_of(ids)
    return native.Tokens(ids=address, id_bytes=id_bytes, count=count), owner
