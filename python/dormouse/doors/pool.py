"""Door B, a memory pool: what is built inside comes from dormouse and sleeps as a whole.

Torch asks us for whole segments and divides them without telling, so one tensor of a pool cannot
sleep by itself, and work of any stream may touch any of it: a pool is put to sleep only when the
whole GPU is idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import StateError
from ..runtime import Runtime
from .whole import pluggable


def closed_because() -> str | None:
    """Why torch has no pools for us, or None. Starts nothing of CUDA's."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"torch's allocator is {backend!r}, and only its own, 'native', has memory pools"
    return None


class Pool:
    """A ``torch.cuda.MemPool`` whose memory is dormouse's, under one tag.

    ``with pool.use():`` around building a model or an optimizer puts this thread's new CUDA
    tensors there; torch's own allocator stays in charge of all others. Where memory lacks, torch
    raises its own ``torch.OutOfMemoryError``. ``backup=False``: bytes are dropped on sleep and
    zero after wake.

    :meth:`sleep` and :meth:`wake` are for one thread at a time.
    """

    def __init__(self, runtime: Runtime, name: str, *, backup: bool = True):
        self._device = runtime.device
        self._tag = runtime.tag(name, backup=backup)
        self._name = name
        self._asleep = False
        # Torch's pool need not own the allocator: that of some versions only refers to it.
        self._allocator = pluggable("torch_pool_malloc")
        self._pool = torch.cuda.MemPool(self._allocator.allocator())

    @property
    def is_asleep(self) -> bool:
        """Whether the bytes are gone from the GPU."""
        return self._asleep

    @contextlib.contextmanager
    def use(self) -> Iterator[Pool]:
        """CUDA tensors this thread makes inside lie in the pool. Refused while it sleeps."""
        if self._asleep:
            raise StateError(f"pool {self._name!r} is asleep; wake it before using it")
        with self._tag.collect(), torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield self

    def sleep(self, tier: str = "nvme") -> str | None:
        """Waits for the GPU, then takes every byte of the pool off it, at unchanged addresses.

        All of it or nothing: where a part finds no place, the rest is woken again. Returns why the
        pool stays awake, or None. Nothing of it may be touched until :meth:`wake`: that would end
        the process. Freeing its tensors is fine.
        """
        # True until all of it is known to be awake: torch would hand out parts that are not.
        self._asleep = True
        declined = self._tag.sleep(tier)
        if declined is not None:
            self.wake()
        return declined

    def wake(self) -> None:
        """Brings every byte back to its own address."""
        self._tag.wake()
        self._asleep = False
