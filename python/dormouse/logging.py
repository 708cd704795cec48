"""Forwards the library's log events to Python's ``logging``.

    dormouse.logging.start()

An event of the library's target ``offload`` becomes a record of the logger ``dormouse.offload``,
with the time of the event; ``record.fields`` has the event's fields. ``DORMOUSE_LOG`` selects the
events (``info,offload=debug``; by default warnings and errors); handlers and levels of ``logging``
apply on top.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import threading

from . import _native as native
from .errors import ArgumentError, DormouseError

LEVELS = {
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
}
_BUFFER_BYTES = 64 << 10

_lock = threading.Lock()
_forwarder: _Forwarder | None = None


def start(period_s: float = 0.5) -> None:
    """Starts a daemon thread that forwards new events every ``period_s`` seconds.

    From then on the library writes nothing to standard error; ``DORMOUSE_LOG_FILE`` is unaffected.
    Idempotent: while forwarding is on, a repeated call changes nothing. Remaining events are
    forwarded at interpreter exit. A forked child has no such thread and no events. Any-thread.
    Raises :class:`ArgumentError` if ``period_s`` is not positive.
    """
    global _forwarder
    if not period_s > 0:
        raise ArgumentError(f"period_s is {period_s}; accepted: positive numbers")
    with _lock:
        if _forwarder is None:
            _forwarder = _Forwarder(period_s)
            atexit.register(stop)


def stop() -> None:
    """Forwards the remaining events and stops the thread. Idempotent. Any-thread."""
    global _forwarder
    with _lock:
        forwarder, _forwarder = _forwarder, None
    if forwarder is not None:
        atexit.unregister(stop)
        forwarder.stop()


class _Forwarder:
    def __init__(self, period_s: float):
        self._period_s = period_s
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        # The first read starts the library's queue: no event after start() is missed.
        self._forward()
        self._thread = threading.Thread(target=self._run, name="dormouse-logging", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() == self._process:
            self._stopped.set()
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._period_s):
                self._forward()
            self._forward()
        except DormouseError:
            logging.getLogger("dormouse").exception("log events are no longer forwarded")

    def _forward(self) -> None:
        """Forwards the events there are, oldest first."""
        written = ctypes.c_uint64()
        while True:
            native.call("log_read", self._buffer, len(self._buffer), ctypes.byref(written))
            if written.value <= 1:
                return
            for line in self._buffer.value.decode("utf-8", "replace").splitlines():
                _handle(json.loads(line))


def _handle(event: dict) -> None:
    logger = logging.getLogger(f"dormouse.{event['target']}")
    level = LEVELS[event["level"]]
    if not logger.isEnabledFor(level):
        return
    fields = event["fields"]
    message = " ".join([event["message"], *(f"{name}={value}" for name, value in fields.items())])
    extra = {"fields": fields}
    record = logger.makeRecord(logger.name, level, "libdormouse", 0, message, (), None, extra=extra)
    record.created = event["time_ns"] / 1e9
    record.msecs = event["time_ns"] // 1_000_000 % 1000
    logger.handle(record)
