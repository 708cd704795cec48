"""Ends collectives that wait for a rank that will not come."""

from __future__ import annotations

import contextlib
import datetime
import logging

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)

_NO_TIME = datetime.timedelta(milliseconds=1)
# The tag of the receive that times out. No rank sends a message with it.
_TAG = 0x646F726D


def end_waits() -> None:
    """Ends what waits in any process group of this process, and what waits for it elsewhere, with
    an error. The groups cannot be used afterwards. Any-thread.

    Gloo has no abort. But a receive that times out closes all connections of its group, so that
    everything that waits for them ends. For NCCL it is torch's abort; other backends than these
    have it or go on waiting.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() == 1:
            continue
        try:
            group.abort()
            if "gloo" in dist.get_backend_config(group):
                _close_connections(group)
        except Exception:
            _log.warning("a process group was not closed", exc_info=True)


def _close_connections(group: dist.ProcessGroup) -> None:
    other = (group.rank() + 1) % group.size()
    backend = group._get_backend(torch.device("cpu"))
    # Each network interface has connections of its own, which tags take in turn.
    interfaces = len(getattr(backend, "wrapped_pg", backend).options._devices)
    for tag in range(_TAG, _TAG + interfaces):
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], other, tag).wait(_NO_TIME)
