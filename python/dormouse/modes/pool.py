"""Mode ``"pool"``: memory pools whose memory is dormouse's and which sleep as a whole.

Torch requests whole segments and suballocates them without notice. A single tensor of a pool
therefore cannot sleep, and any stream may use any part of a segment: a pool falls asleep only
when the whole GPU is idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import DormouseError, MemoryTierError, StateError
from ..runtime import Runtime
from .allocator import pluggable


def unavailable_because() -> str | None:
    """Returns why torch offers no memory pools, or None. Does not initialize CUDA."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"torch's allocator is {backend!r}; only 'native' supports memory pools"
    return None


class Pool:
    """A ``torch.cuda.MemPool`` whose memory belongs to dormouse, under one tag.

    ``with pool.use():`` places the CUDA tensors this thread creates, such as a model or an
    optimizer, in the pool; torch's own allocator serves all others. If memory runs out, torch
    raises ``torch.OutOfMemoryError``. Memory that torch frees goes back to the driver. With
    ``backup=False`` the bytes are dropped on sleep and zero after wake.

    :meth:`sleep` and :meth:`wake` are not thread-safe.
    """

    def __init__(self, runtime: Runtime, name: str, *, backup: bool = True):
        self._device = runtime.device
        self._tag = runtime.tag(name, backup=backup)
        self._name = name
        self._asleep = False
        # In some torch versions the pool only references the allocator, so keep it alive here.
        self._allocator = pluggable("torch_pool_malloc", "torch_pool_free")
        self._pool = torch.cuda.MemPool(self._allocator.allocator())

    @property
    def is_asleep(self) -> bool:
        """Whether the pool's bytes are off the GPU."""
        return self._asleep

    @contextlib.contextmanager
    def use(self) -> Iterator[Pool]:
        """Places CUDA tensors that this thread creates inside the context in the pool.

        Raises :class:`StateError` while the pool is asleep.
        """
        if self._asleep:
            raise StateError(f"pool {self._name!r} is asleep; wake it before using it")
        with self._tag.collect(), torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield self

    def sleep(self, tier: str = "nvme") -> str | None:
        """Waits for the GPU, then moves every byte of the pool off it; addresses stay valid. The
        pages go back to the driver, for torch's own allocator and other processes.

        All or nothing: if the tiers have no room for some part, the rest is woken again. Returns
        the reason the pool stays awake, or None. Until :meth:`wake`, an access to the pool's
        memory ends the process; freeing its tensors is allowed. Raises as :meth:`Tag.sleep` does;
        the pool is awake then too.
        """
        # Set until all parts are known to be awake: torch would hand out parts that are not.
        self._asleep = True
        try:
            declined = self._tag.sleep(tier)
        except DormouseError:
            # Some parts may sleep, or none, say for a tier that is closed.
            self.wake()
            raise
        if declined is not None:
            self.wake()
        return declined

    def wake(self) -> None:
        """Restores every byte at its original address.

        Empties torch's cache if the GPU has no room. Raises :class:`MemoryTierError` if there is
        still none; the pool stays asleep and keeps its bytes.
        """
        try:
            self._tag.wake()
        except MemoryTierError:
            # Torch's allocator may cache what the pool has given back.
            torch.cuda.empty_cache()
            self._tag.wake()
        self._asleep = False
