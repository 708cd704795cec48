"""The context in which a failure of one rank is one of all."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import socket
from collections.abc import Iterator

import torch.distributed as dist

from .. import ranks
from ..errors import DormouseError
from .first import RankFailedError
from .groups import end_waits
from .member import Member
from .monitor import Monitor

# Contexts that this process entered: ranks enter the same ones, in the same order.
_numbers = itertools.count()
_member: Member | None = None


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Context, or decorator, of work that all ranks do together: a training loop or a step.

    If an exception leaves it on one rank, or a rank's process ends in it, every other rank gets
    :class:`RankFailedError`, with that rank and its error: at once where it waits in a collective
    of any process group, a trainer's included, else at the next collective, at the next microbatch of
    a shared step, or at the end of the context. The rank itself keeps its own exception. An
    exception that is caught inside, a step without a backward, an evaluation and a slow rank are no
    failures; a rank that leaves without an exception may leave before the others.

    Afterwards the process groups of every rank are closed: end the process, or call
    ``destroy_process_group`` and initialize a new group. Gradients of the step are incomplete.

    Collective: ranks enter it together, as often as each other. Does nothing inside itself, in one
    process, and without torch.distributed. Not thread-safe. Costs a thread and a connection to rank
    0, and nothing per step.

    Raises :class:`ConnectionError` if rank 0 cannot be reached, and the store's error if it does not
    come.
    """
    global _member
    if ranks.world_size(None) == 1 or _member is not None:
        yield
        return
    _member = member = _join()
    try:
        yield
    except BaseException as error:
        failure = _leave(member, error)
        if failure is not None and failure.rank != member.rank and _may_follow(error):
            raise RankFailedError(failure) from error
        raise
    finally:
        _member = None
    failure = member.leave(None)
    if failure is not None:
        raise RankFailedError(failure)


def check() -> None:
    """Raises :class:`RankFailedError` if another rank is known to have failed. Cheap."""
    if _member is not None and _member.failure is not None:
        raise RankFailedError(_member.failure)


def _leave(member: Member, error: BaseException):
    if isinstance(error, SystemExit) and not error.code:
        return member.leave(None)
    return member.leave(error, may_follow=_may_follow(error))


def _may_follow(error: BaseException) -> bool:
    """Returns whether the error may be that of a collective which another rank's failure ended."""
    return isinstance(error, RuntimeError) and not isinstance(error, DormouseError)


def _join() -> Member:
    """Connects this rank to the monitor, which is rank 0's."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    key, own = f"dormouse/failures/{next(_numbers)}", _tcp_store(store)
    if rank == 0:
        host, at_store = _address(own)
        meeting = Monitor(host, dist.get_world_size()).meeting
        store.set(key, json.dumps(meeting | {"at_store": at_store}))
    meeting = json.loads(store.get(key))
    return Member(meeting, rank, end_waits, _hosts(own, meeting))


def _tcp_store(store: dist.Store) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _hosts(store: dist.TCPStore | None, meeting: dict) -> list[str]:
    """Returns where this rank looks for rank 0's machine, the most likely place first.

    Rank 0 may know itself by an address that means another machine to this one: Debian maps a
    machine's own name to 127.0.1.1. If the store is on its machine, this rank has reached that.
    """
    own = [meeting["host"]]
    if store is None:
        return own
    return [store.host, *own] if meeting["at_store"] else [*own, store.host]


def _address(store: dist.TCPStore | None) -> tuple[str, bool]:
    """Returns an address of this machine for the other ranks, and whether the store is on it."""
    if store is not None:
        # The one that faces the store, which all ranks reach. Nothing is sent.
        for kind, *_, there in socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                here = probe.getsockname()[0]
                return here, here == there[0] or ipaddress.ip_address(here).is_loopback
    try:
        return socket.gethostbyname(socket.gethostname()), False
    except OSError:
        return "127.0.0.1", False
