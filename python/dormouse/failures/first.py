"""Which rank's failure is the cause of the others."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DormouseError

# How long an error that may follow from another rank's failure waits for news of that one.
CAUSE_WAIT_S = 1.0


@dataclass(frozen=True)
class Failure:
    """What ended a rank."""

    rank: int
    error: str
    """Type and message of its error, or that its process ended."""


class RankFailedError(DormouseError):
    """Another rank failed. Process groups of this process cannot be used any more.

    ``failure``: of the rank that failed first.
    """

    def __init__(self, failure: Failure):
        super().__init__(f"rank {failure.rank} failed: {failure.error}")
        self.failure = failure

    def __reduce__(self):
        return type(self), (self.failure,)


class FirstFailure:
    """Decides which of several failures is the cause.

    A rank that dies closes its connections, so that collectives of other ranks end with errors,
    and their reports may arrive before the death is seen. An error that may be one of those waits
    for ``CAUSE_WAIT_S``. Times are seconds of one clock.
    """

    def __init__(self):
        self.cause: Failure | None = None
        """None: nothing is decided. Never changes once it is."""
        self._waiting: Failure | None = None
        self._due_s = 0.0

    def report(self, failure: Failure, now_s: float, *, may_follow: bool = False) -> None:
        """Takes a failure in. ``may_follow``: whether another rank's may be its cause."""
        if self.cause is not None:
            return
        if not may_follow:
            self.cause = failure
        elif self._waiting is None:
            self._waiting, self._due_s = failure, now_s + CAUSE_WAIT_S

    def settle(self, now_s: float) -> None:
        """Takes the error that waits for the cause, if it waited long enough."""
        if self.cause is None and self._waiting is not None and now_s >= self._due_s:
            self.cause = self._waiting

    def wait_s(self, now_s: float) -> float | None:
        """Returns when to settle next, in seconds from now; None: there is nothing to settle."""
        if self.cause is not None or self._waiting is None:
            return None
        return max(0.0, self._due_s - now_s)
