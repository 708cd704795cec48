"""Tests with verl's own worker: `make test-verl`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Models of the other tests, and the CPU as verl's platform.
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples" / "verl")]

# Before verl, which chooses its platform when it is imported.
import on_cpu
import pytest
import torch

import dormouse


def pytest_configure(config):
    torch.set_num_threads(1)
    if "libdormouse_preload.so" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("these tests sleep in place: run them with `make test-verl`", returncode=2)


@pytest.fixture(scope="session", autouse=True)
def process_group():
    with on_cpu.process_group():
        yield


@pytest.fixture(scope="session")
def runtime():
    directory = ROOT / "target" / "test-nvme-verl"
    directory.mkdir(parents=True, exist_ok=True)
    with dormouse.Runtime(nvme_dir=directory, nvme_file_bytes=1 << 30) as runtime:
        yield runtime
