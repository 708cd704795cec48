"""The GPU that ``dormouse.install()`` takes where none is named."""

from __future__ import annotations

import pytest
import torch

from dormouse.install import _default_gpu, _device

GPUS = 4


@pytest.fixture
def gpus(monkeypatch):
    """A machine with GPUs; CUDA is not initialized."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


def test_each_rank_takes_its_own_gpu(gpus):
    for rank in range(GPUS):
        gpus.setenv("LOCAL_RANK", str(rank))
        assert _device(None) == torch.device("cuda", rank)
        assert _default_gpu() == (rank, f"LOCAL_RANK is {rank}")


@pytest.mark.parametrize("rank", [None, "", "4", "-1", "one", "²", "1.0"])
def test_the_first_gpu_without_a_rank_among_them(gpus, rank):
    if rank is not None:
        gpus.setenv("LOCAL_RANK", rank)
    assert _device(None) == torch.device("cuda", 0)
    told = "LOCAL_RANK is not set" if rank is None else f"{rank!r}; accepted: 0 to 3"
    assert told in _default_gpu()[1]


def test_a_named_gpu_and_torchs_current_one_come_first(gpus):
    gpus.setenv("LOCAL_RANK", "3")
    assert _device(1) == _device("cuda:1") == torch.device("cuda", 1)
    assert _device("host") == torch.device("cpu")
    gpus.setattr(torch.cuda, "is_initialized", lambda: True)
    gpus.setattr(torch.cuda, "current_device", lambda: 2)
    assert _device(None) == torch.device("cuda", 2)
    assert _default_gpu() == (2, "it is torch's current GPU")


def test_the_host_where_there_is_no_gpu(gpus):
    gpus.setenv("LOCAL_RANK", "0")
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    assert _device(None) == torch.device("cpu")
    assert _default_gpu() == (None, "torch finds no GPU")
