"""The thread of rank 0 that is told of failures and tells all ranks of the first."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from .first import Failure, FirstFailure
from .messages import MESSAGE_BYTES_MAX, Lines, closed_in_children, prepared, send

_log = logging.getLogger(__name__)

ENDED = "its process ended"
# Connections that have not said which rank they are of.
STRANGERS_MAX = 64
TOKEN_BYTES = 16


@dataclass
class _Peer:
    """A connection to a rank."""

    connection: socket.socket
    rank: int | None = None
    """None: it has not said."""
    has_left: bool = False
    """Whether it said that it goes."""
    lines: Lines = field(default_factory=Lines)


def _listening(backlog: int) -> socket.socket:
    """Returns a socket on all interfaces, by IPv4 and IPv6 where the machine has both: another rank
    may know this machine by another address than its own."""
    if socket.has_dualstack_ipv6():
        # A machine may have the sockets and no address for them.
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=backlog)


class Monitor:
    """Accepts a connection of each rank, and passes on the first failure.

    A connection that closes without a message means that its process ended. The thread ends with
    the last connection, or with the process.
    """

    def __init__(self, host: str, ranks: int):
        """``host``: an address of this machine for ranks that know no other."""
        server = _listening(ranks)
        server.setblocking(False)
        self._server = closed_in_children(server)
        self._token = secrets.token_hex(TOKEN_BYTES)
        self.meeting = {"host": host, "port": server.getsockname()[1], "token": self._token}
        """What a rank needs to connect."""
        self._ranks = ranks
        self._first = FirstFailure()
        self._may_end = self._has_told = False
        self._peers: dict[int, _Peer] = {}
        self._strangers = self._closed = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="dormouse-monitor", daemon=True).start()

    def _run(self) -> None:
        try:
            while self._closed < self._ranks:
                self._run_once()
        except Exception:
            _log.exception("ranks are no longer told of failures")
            self._let_go()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()
            self._selector.close()

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._first.wait_s(time.monotonic())):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        self._first.settle(time.monotonic())
        if self._first.cause is not None and not self._has_told:
            self._has_told = True
            self._tell_all()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            # It was closed again.
            return
        if self._strangers == STRANGERS_MAX:
            connection.close()
            return
        self._strangers += 1
        peer = _Peer(prepared(connection))
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(MESSAGE_BYTES_MAX)
            messages = peer.lines.add(received)
        except (OSError, ValueError):
            received, messages = b"", []
        for message in messages:
            if peer.rank is None:
                self._greet(peer, message)
            elif "failed" in message:
                peer.has_left = True
                failure = Failure(peer.rank, message["failed"])
                may_follow = message["may_follow"]
                self._first.report(failure, time.monotonic(), may_follow=may_follow)
            elif "left" in message:
                peer.has_left = True
                if peer.rank == 0:
                    self._let_go()
        if not received or peer.rank is None:
            self._close(peer)

    def _greet(self, peer: _Peer, message: dict) -> None:
        rank = message.get("rank")
        is_known = hmac.compare_digest(str(message.get("token")), self._token)
        if is_known and rank in range(self._ranks) and rank not in self._peers:
            self._strangers -= 1
            peer.rank = rank
            self._peers[rank] = peer
            self._tell(peer)

    def _close(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is None:
            self._strangers -= 1
            return
        self._closed += 1
        if not peer.has_left:
            self._first.report(Failure(peer.rank, ENDED), time.monotonic())

    def _let_go(self) -> None:
        """Tells all ranks that the end of this thread is no failure."""
        self._may_end = True
        self._tell_all()

    def _tell_all(self) -> None:
        # Rank 0 last: its process, which this thread is of, may end when it has been told.
        for _, peer in sorted(self._peers.items(), reverse=True):
            self._tell(peer)

    def _tell(self, peer: _Peer) -> None:
        # A connection that ended is noticed where it is read.
        with contextlib.suppress(OSError):
            if self._first.cause is not None:
                cause = self._first.cause
                send(peer.connection, rank=cause.rank, error=cause.error)
            elif self._may_end:
                send(peer.connection, monitor_may_end=True)
