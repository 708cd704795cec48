"""Drafts of single sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .. import _native as native
from ..errors import ArgumentError
from .histories import History, tokens_of

# Tokens before a position that are compared.
CONTEXT_TOKENS = 7
# Largest window.
WINDOW_TOKENS_MAX = 32


class Drafter:
    """Drafts one response to a prompt. Not thread-safe; one for each sequence.

    The window, the most tokens of the next draft, begins at 2, grows by 2 up to 32 with each draft
    that is accepted as a whole, and begins again after a rejection.
    """

    def __init__(self, history: History, prompt: torch.Tensor | Sequence[int]):
        self._history = history
        self._ids = (ctypes.c_int32 * WINDOW_TOKENS_MAX)()
        self._draft = native.Draft(ids=ctypes.addressof(self._ids))
        tokens, owner = tokens_of(prompt)
        digest = native.Digest()
        native.call("history_digest", ctypes.byref(tokens), ctypes.byref(digest))
        del owner
        self._draft.prompt = digest

    def draft(
        self, end: torch.Tensor | Sequence[int], tokens_max: int = WINDOW_TOKENS_MAX
    ) -> list[int]:
        """Returns the tokens that may come next, at most ``tokens_max`` and the window; empty if
        nothing matches, or the prompt has no responses.

        ``end``: the last tokens of the sequence, prompt included; the last 7 are read. Raises
        :class:`dormouse.ArgumentError` for ids outside the vocabulary.
        """
        return draft_all([self], [end], tokens_max)[0]

    def feedback(self, accepted: int) -> None:
        """Says how many tokens of the last draft were accepted. Without it the window stays. Raises
        :class:`dormouse.ArgumentError` for fewer than 0 and for more than were drafted."""
        feedback_all([self], [accepted])

    @property
    def window_tokens(self) -> int:
        """The most tokens of the next draft."""
        return self._draft.window_tokens or 2

    @property
    def matched_tokens(self) -> int:
        """Number of tokens that the last draft's match has: 3 to 7; 0 without one."""
        return self._draft.matched_tokens


def draft_all(
    drafters: Sequence[Drafter],
    ends: Sequence[torch.Tensor | Sequence[int]],
    tokens_max: int | Sequence[int] = WINDOW_TOKENS_MAX,
) -> list[list[int]]:
    """Returns drafts of several sequences of one history, in one call of the library.
    ``tokens_max``: of all, or of each."""
    limits = [tokens_max] * len(drafters) if isinstance(tokens_max, int) else tokens_max
    for limit in limits:
        if limit < 0:
            raise ArgumentError(f"tokens_max is {limit}; accepted: 0 or more")
    kept = []
    for drafter, end, limit in zip(drafters, ends, limits, strict=True):
        drafter._draft.capacity = min(limit, WINDOW_TOKENS_MAX)
        drafter._draft.end, owner = tokens_of(end[-CONTEXT_TOKENS:])
        kept.append(owner)
    _call("history_draft", drafters)
    return [list(each._ids[: each._draft.count]) for each in drafters]


def feedback_all(drafters: Sequence[Drafter], accepted: Sequence[int]) -> None:
    """Says of several sequences of one history how many tokens of their last drafts were accepted,
    in one call of the library: :meth:`Drafter.feedback`. On an error no window is changed."""
    for drafter, count in zip(drafters, accepted, strict=True):
        if count < 0:
            raise ArgumentError(f"accepted is {count}; accepted: 0 or more")
        drafter._draft.accepted = count
    _call("history_feedback", drafters)


def _call(name: str, drafters: Sequence[Drafter]) -> None:
    if not drafters:
        return
    if len({id(each._history) for each in drafters}) > 1:
        raise ArgumentError("drafters are of several histories; accepted: those of one")
    structs = (native.Draft * len(drafters))(*(each._draft for each in drafters))
    native.call(name, drafters[0]._history._handle, structs, len(structs))
    for struct, drafter in zip(structs, drafters, strict=True):
        drafter._draft = native.Draft.from_buffer_copy(struct)


def equal_tokens(draft: list[int], own: list[int]) -> int:
    """Returns the number of tokens at the beginning of a draft that came."""
    pairs = zip(draft, own, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(own)))
