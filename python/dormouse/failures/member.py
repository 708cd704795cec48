"""A rank's connection to the monitor."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from .first import Failure
from .messages import MESSAGE_BYTES_MAX, Lines, described, prepared, send
from .monitor import ENDED

# To one address.
CONNECT_S_MAX = 60.0
# For an answer to a failure: the wait for its cause, and the end of collectives.
ANSWER_S_MAX = 5.0


class Member:
    """One rank. A thread of its own hears of failures."""

    def __init__(
        self,
        meeting: dict,
        rank: int,
        on_failure: Callable[[], None],
        hosts: Sequence[str] = (),
    ):
        """``meeting``: of the monitor. ``on_failure``: called once, in the thread, after any rank
        failed; this one too. ``hosts``: names or addresses of the monitor's machine, in the order
        in which they are tried; none: that of ``meeting``.

        Raises :class:`ConnectionError` if the monitor cannot be reached.
        """
        hosts = list(hosts) or [meeting["host"]]
        self._connection = prepared(_connected(hosts, meeting["port"], rank))
        self._connection.settimeout(None)
        self.rank = rank
        self.failure: Failure | None = None
        """The first of any rank, once it is known."""
        self._on_failure = on_failure
        # From then on the end of the connection is no failure.
        self._may_end = False
        send(self._connection, rank=rank, token=meeting["token"])
        self._thread = threading.Thread(target=self._run, name="dormouse-member", daemon=True)
        self._thread.start()

    def leave(self, error: BaseException | None, *, may_follow: bool = False) -> Failure | None:
        """Says that this rank goes, and with which error; returns the first failure of any rank.

        With an error, waits until the failure that is its cause is known, at most ``ANSWER_S_MAX``.
        ``may_follow``: whether another rank's may be it.
        """
        with contextlib.suppress(OSError):
            if error is None:
                send(self._connection, left=True)
            else:
                send(self._connection, failed=described(error), may_follow=may_follow)
                self._thread.join(ANSWER_S_MAX)
        # The thread may be ending collectives.
        failure, self._may_end = self.failure, True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(ANSWER_S_MAX)
        self._connection.close()
        return failure

    def _run(self) -> None:
        self.failure = self._heard()
        if self.failure is not None:
            self._on_failure()

    def _heard(self) -> Failure | None:
        lines = Lines()
        while True:
            try:
                received = self._connection.recv(MESSAGE_BYTES_MAX)
                messages = lines.add(received)
            except (OSError, ValueError):
                received, messages = b"", []
            for message in messages:
                if "error" in message:
                    return Failure(message["rank"], message["error"])
                self._may_end |= "monitor_may_end" in message
            if not received:
                return None if self._may_end else Failure(0, ENDED)


def _connected(hosts: Sequence[str], port: int, rank: int) -> socket.socket:
    found = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), CONNECT_S_MAX)
        except OSError as error:
            found.append(f"{host} port {port}: {error}")
    raise ConnectionError(
        f"rank {rank} cannot connect to rank 0 at {', '.join(found)}; accepted: a MASTER_ADDR by "
        "which every rank reaches rank 0's machine, and no firewall between ranks. One that opens "
        "MASTER_PORT alone does not suffice: the system chooses this port"
    )
