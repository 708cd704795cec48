"""Typed errors, one class per block of status codes."""

from __future__ import annotations


class DormouseError(RuntimeError):
    """Something libdormouse refused. ``status`` is its code; the text says values and limits."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class ArgumentError(DormouseError, ValueError):
    """An argument that is not accepted (-1xx)."""


class MemoryTierError(DormouseError, MemoryError):
    """A tier or budget that cannot hold what was asked (-2xx)."""


class DeviceError(DormouseError):
    """The device refused or is not available (-3xx)."""


class StorageError(DormouseError, OSError):
    """Input or output failed, or bytes came back changed (-4xx)."""


class StateError(DormouseError):
    """A call out of order, on a stale handle, or from a forked child (-5xx)."""


class InternalError(DormouseError):
    """A defect in libdormouse itself (-9xx). Please report it."""


_BLOCKS = {
    1: ArgumentError,
    2: MemoryTierError,
    3: DeviceError,
    4: StorageError,
    5: StateError,
}


def from_status(status: int, message: str) -> DormouseError:
    """The exception for a negative ``status``."""
    return _BLOCKS.get(-status // 100, InternalError)(message, status)
