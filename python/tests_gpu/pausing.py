"""What tests of memory that is paused and resumed share: bytes, and the driver's figure."""

from __future__ import annotations

import tempfile
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


def on_disk() -> tempfile.TemporaryDirectory:
    """A folder of the checkout: one for temporary files may be memory."""
    target = Path(__file__).resolve().parents[2] / "target"
    target.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=target)
