"""Chooses one of several kernels for each kind of call, by running each of them once.

The first call of a kind waits for the measurements; every later one, whichever pass or thread it
belongs to, gets the same kernel. A kernel that raises, in its measurement or later, is not run
again for that kind, and its reason is kept. What a measurement is, and its clock, is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

REASON_CHARS_MAX = 200

Result = TypeVar("Result")


class Kernel(Protocol):
    """A candidate."""

    name: str


@dataclass
class Choice:
    """The kernels of one kind of call."""

    ranked: list[Kernel]
    """Those that serve it, the fastest first."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each measurement, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a kernel does not serve it, by name."""


class Choices:
    """The choices of a process. Kinds are few: the caller rounds sizes.

    Thread-safe; measurements run one at a time.
    """

    def __init__(self, last_resort: Kernel, is_limit: Callable[[Exception], bool]):
        """``last_resort``: serves every call that all others refuse; never measured. ``is_limit``:
        returns whether an error says nothing about a kernel, as want of memory: a call raises it,
        and a measurement that meets it leaves its kind with the candidates as they are listed."""
        self._last_resort, self._is_limit = last_resort, is_limit
        self._known: dict[Hashable, Choice] = {}
        self._lock = threading.RLock()

    def known(self) -> dict[Hashable, Choice]:
        """Returns the choices so far."""
        with self._lock:
            return dict(self._known)

    def settle(
        self,
        kind: Hashable,
        candidates: Sequence[Kernel],
        measure_of: Callable[[], Callable[[Kernel], float]] | None,
    ) -> None:
        """Chooses for a kind of call, if that was not done before.

        ``candidates``: the first wins among equals. ``measure_of()``: returns a function that
        measures a kernel, and returns seconds or raises; None: candidates are ranked as listed.
        """
        with self._lock:
            if kind not in self._known:
                measure = None if measure_of is None else measure_of()
                self._known[kind] = self._measured(candidates, measure)

    def run(self, kind: Hashable, call: Callable[[Kernel], Result]) -> Result:
        """Returns ``call(kernel)`` of the fastest kernel that accepts the call, of a settled kind.

        Raises errors of limits, and what the last resort raises.
        """
        choice = self._known[kind]
        while True:
            kernel = next(iter(choice.ranked), self._last_resort)
            try:
                return call(kernel)
            except Exception as error:
                if kernel is self._last_resort or self._is_limit(error):
                    raise
                self._refuse(choice, kernel, error)

    def _measured(self, candidates, measure: Callable[[Kernel], float] | None) -> Choice:
        choice = Choice(list(candidates))
        if measure is None:
            return choice
        for kernel in candidates:
            try:
                choice.seconds[kernel.name] = measure(kernel)
            except Exception as error:
                if self._is_limit(error):
                    return Choice(list(candidates), refused={"measurements": _reason(error)})
                self._refuse(choice, kernel, error)
        choice.ranked.sort(key=lambda kernel: choice.seconds[kernel.name])
        return choice

    def _refuse(self, choice: Choice, kernel: Kernel, error: Exception) -> None:
        with self._lock:
            # Another thread's call may have been refused at the same time.
            choice.ranked = [each for each in choice.ranked if each is not kernel]
            choice.refused[kernel.name] = _reason(error)


def _reason(error: BaseException) -> str:
    """Returns the first line of an error."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"[:REASON_CHARS_MAX]
