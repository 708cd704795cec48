"""The library's log events in Python's :mod:`logging`.

The library queues its events and this module polls them: no thread of the library calls Python.
``DORMOUSE_LOG`` selects the events; without it there are warnings only.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import threading
from collections.abc import Iterator

from . import _native as native
from .errors import ArgumentError, DormouseError

_BUFFER_BYTES = 1 << 16
# Limit of reads per flush: events may arrive faster than handlers process them.
_READS_MAX = 256
# Below logging.DEBUG; builds with trace events have it.
_TRACE = 5
_LEVELS = {
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": _TRACE,
}


def events() -> Iterator[dict]:
    """Removes the queued events, oldest first.

    Each has ``time_ns``, ``level``, ``target``, ``message`` and ``fields``. The first call starts
    the queue; from then on the library writes no events to standard error.
    """
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    written = ctypes.c_uint64()
    for _ in range(_READS_MAX):
        native.call("log_read", buffer, _BUFFER_BYTES, ctypes.byref(written))
        lines = buffer.value.splitlines()
        if not lines:
            return
        yield from map(json.loads, lines)


class Bridge:
    """Passes events to loggers named ``dormouse.<target>`` from a thread of its own."""

    def __init__(self, name: str, interval_s: float):
        if not interval_s > 0:
            raise ArgumentError(f"interval_s is {interval_s}; accepted: positive numbers")
        self._name = name
        self._interval_s = interval_s
        self._process = os.getpid()
        self._stopped = threading.Event()
        # One reader at a time, so that records keep their order.
        self._lock = threading.Lock()
        self.flush()
        self._thread = threading.Thread(target=self._run, name="dormouse-log", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def flush(self) -> None:
        """Passes on the queued events. Any-thread."""
        with self._lock:
            for event in events():
                self._pass_on(event)

    def stop(self) -> None:
        """Passes on the queued events and ends the thread. Idempotent."""
        # A forked child has neither the thread nor events.
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.flush()
            except DormouseError:
                logging.getLogger(self._name).exception("log events could not be read")
                return

    def _pass_on(self, event: dict) -> None:
        logger = logging.getLogger(f"{self._name}.{event['target']}")
        level = _LEVELS.get(event["level"], logging.DEBUG)
        if not logger.isEnabledFor(level):
            return
        fields = "".join(f" {name}={json.dumps(value)}" for name, value in event["fields"].items())
        record = logger.makeRecord(
            logger.name, level, "dormouse", 0, "%s%s", (event["message"], fields), None
        )
        # The time of the event, not of the read.
        record.created = event["time_ns"] / 1e9
        record.msecs = event["time_ns"] // 1_000_000 % 1000
        record.fields = event["fields"]
        logger.handle(record)


def log_to_logging(name: str = "dormouse", interval_s: float = 0.5) -> Bridge:
    """Passes the library's log events to Python's :mod:`logging`.

    Loggers are named ``<name>.<target>``, for example ``dormouse.offload``; records carry the typed
    values as ``record.fields``. Events are read every ``interval_s`` seconds, by
    :meth:`Bridge.flush`, and at exit. Events before the call are written to standard error; call it
    before the first :class:`dormouse.Runtime` to miss none. Raises :class:`ArgumentError` if
    ``interval_s`` is not positive.
    """
    return Bridge(name, interval_s)
