"""What tests of memory that is paused and resumed share: bytes, and the driver's figure."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from conftest import SLACK_BYTES, alike

MIB = 1 << 20
# More than the driver's figure may be off by.
UNIT = max(4 * MIB, SLACK_BYTES * 3 // 2)
TOTAL = {"STANDIN_CUDA_TOTAL_BYTES": str(64 * MIB)}


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def has_more(before: int, nbytes: int) -> bool:
    """Whether the driver has that much more than ``before``."""
    return alike(free_bytes(), before + nbytes)


def filled(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def data_of(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes of their own for each seed, drawn eight at a time."""
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64)
    words.random_(generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8)[:nbytes]


def holds(tensor: torch.Tensor, seed: int) -> bool:
    bytes_of = tensor.detach().cpu().view(-1).view(torch.uint8)
    return torch.equal(bytes_of, data_of(tensor.nbytes, seed))


def fill(tensor: torch.Tensor, seed: int) -> None:
    tensor.detach().view(-1).view(torch.uint8).copy_(data_of(tensor.nbytes, seed))


def file_bytes_of_cycles(
    runtime, put_to_sleep: Callable[[], None], owners: Sequence, held, block
) -> int:
    """Lets weights and a cache sleep in the file and wake, three times, with other memory in their
    place meanwhile. Returns the bytes of the file that they took, the same each time.

    ``put_to_sleep``: of ``owners``, in whose order they wake. ``held``: of the weights, each with
    the data of its number. ``block``: as many bytes of the cache, which has no backup.
    """
    before, used = free_bytes(), set()
    for _ in range(3):
        put_to_sleep()
        assert free_bytes() >= before + 2 * block.nbytes - SLACK_BYTES
        tiers = runtime.stats()["tiers"]
        assert tiers["host"]["current_bytes"] == 0
        used.add(tiers["nvme"]["current_bytes"])
        others = data_of(2 * block.nbytes, 3).cuda()
        del others
        torch.cuda.empty_cache()
        for owner in owners:
            owner.wake()
        assert all(holds(each, seed) for seed, each in enumerate(held))
        assert not block.cpu().any()
        fill(block, 2)
        assert runtime.stats()["tiers"]["nvme"]["current_bytes"] == 0
    assert len(used) == 1
    return used.pop()


def on_disk() -> tempfile.TemporaryDirectory:
    """A folder of the checkout: one for temporary files may be memory."""
    target = Path(__file__).resolve().parents[2] / "target"
    target.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=target)
