"""Messages between ranks: one JSON object a line, over TCP."""

from __future__ import annotations

import json
import os
import socket
import weakref

MESSAGE_BYTES_MAX = 8 << 10
# Text of an error in a message: a character may take twelve bytes.
ERROR_CHARS_MAX = 600

# A machine that vanishes answers nothing: its connections end after IDLE_S + PROBES * INTERVAL_S.
# The kernel answers for a process, however busy it is.
KEEPALIVE_IDLE_S = 2
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_PROBES = 4

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_in_children(connection: socket.socket) -> socket.socket:
    """Returns a socket that forked children of this process do not keep open."""
    _open.add(connection)
    return connection


def prepared(connection: socket.socket) -> socket.socket:
    """Returns a connection that ends when its process or the other's machine does."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return closed_in_children(connection)


def _close_in_child() -> None:
    # Workers of a data loader outlive a rank that is killed, and would keep its connection open.
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def send(connection: socket.socket, **message) -> None:
    """Sends a message. Raises :class:`OSError` if the connection ended."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """The messages of a connection, put together from what arrives."""

    def __init__(self):
        self._rest = b""

    def add(self, received: bytes) -> list[dict]:
        """Returns the messages that ``received`` completes.

        Raises :class:`ValueError` for anything else than messages.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MESSAGE_BYTES_MAX:
            raise ValueError(f"{len(self._rest)} bytes; accepted: {MESSAGE_BYTES_MAX}")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is no object")
        return messages


def described(error: BaseException) -> str:
    """Returns type and message of an error."""
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
