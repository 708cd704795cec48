"""The error of every adapter."""

from __future__ import annotations

from ..errors import DormouseError


class UnsupportedTrainerError(DormouseError, ValueError):
    """The trainer cannot share prompts exactly; says what was seen and what is accepted."""


def refuse(*reasons: tuple[object, str, str]) -> None:
    """Raises :class:`UnsupportedTrainerError` for the first reason that applies. Each has whether
    it applies, what was seen, and what is accepted."""
    for applies, seen, accepted in reasons:
        if applies:
            raise UnsupportedTrainerError(f"{seen}; accepted: {accepted}")
