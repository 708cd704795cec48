"""Typed errors, one class per block of status codes."""

from __future__ import annotations

import torch


class DormouseError(RuntimeError):
    """Base class of all errors. ``status`` is the library's code; 0 if raised in Python."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` is torch's out-of-memory error, or the RuntimeError with torch's text
    that a torch of unknown exports gets instead."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and str(error).startswith("CUDA out of memory")


class ArgumentError(DormouseError, ValueError):
    """An argument that is not accepted, or a destroyed handle (-1xx)."""


class MemoryTierError(DormouseError, MemoryError):
    """A tier or budget without room for the request, or an address without a block (-2xx)."""


class DeviceError(DormouseError):
    """A device that failed or is not available (-3xx)."""


class StorageError(DormouseError, OSError):
    """Failed I/O, or bytes that differ from those written (-4xx)."""


class StateError(DormouseError):
    """A call out of order, on a busy device, or in a forked child (-5xx)."""


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
    """Returns the exception for a negative ``status``."""
    return _BLOCKS.get(-status // 100, InternalError)(message, status)
