"""Tests with Megatron-core on a CPU: `make test-megatron`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Helpers of the other tests, and Megatron on a CPU.
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples" / "megatron")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import dormouse


def pytest_configure(config):
    torch.set_num_threads(1)
    # Megatron names the packages that it would rather have.
    config.addinivalue_line("filterwarnings", "ignore:::megatron")
    if "libdormouse_preload.so" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("these tests sleep in place: run them with `make test-megatron`", returncode=2)


def a_runtime(nvme_file_bytes: int = 1 << 30) -> dormouse.Runtime:
    """A runtime over a file tier; there can be one in a process."""
    directory = ROOT / "target" / "test-nvme-megatron"
    directory.mkdir(parents=True, exist_ok=True)
    return dormouse.Runtime(nvme_dir=directory, nvme_file_bytes=nvme_file_bytes)
