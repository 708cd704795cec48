"""The context in which a failure of one rank is one of all."""

from __future__ import annotations

import contextlib
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

    Raises :class:`OSError` if rank 0 cannot be reached, and the store's error if it does not come.
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
    key = f"dormouse/failures/{next(_numbers)}"
    if rank == 0:
        store.set(key, json.dumps(Monitor(_address(store), dist.get_world_size()).meeting))
    return Member(json.loads(store.get(key)), rank, end_waits)


def _address(store: dist.Store) -> str:
    """Returns the address of this machine at which the other ranks reach it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        # The one that faces the store, which all ranks reach. Nothing is sent.
        kind, *_, there = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return probe.getsockname()[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
