"""Tests with other people's trainers: `make test-trainers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# Models of the other tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pytest
import torch

import dormouse

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config):
    torch.set_num_threads(1)
    if "libdormouse_preload.so" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("these tests sleep in place: run them with `make test-trainers`", returncode=2)


@pytest.fixture(scope="session")
def runtime():
    directory = ROOT / "target" / "test-nvme-trainers"
    directory.mkdir(parents=True, exist_ok=True)
    with dormouse.Runtime(nvme_dir=directory, nvme_file_bytes=1 << 30) as runtime:
        yield runtime
