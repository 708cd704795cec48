"""Tests with other people's trainers: `make test-trainers`."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Models of the other tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pytest
import torch

import dormouse

ROOT = Path(__file__).resolve().parents[2]
# DeepSpeed compiles an operator for shared memory when it first starts ranks on a CPU.
TO_COMPILE = {
    "TORCH_EXTENSIONS_DIR": str(ROOT / "target" / "torch-extensions"),
    "PATH": os.pathsep.join([sysconfig.get_path("purelib") + "/bin", os.environ["PATH"]]),
}


def pytest_configure(config):
    torch.set_num_threads(1)
    if "libdormouse_preload.so" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("these tests sleep in place: run them with `make test-trainers`", returncode=2)


def a_runtime(nvme_file_bytes: int = 1 << 30) -> dormouse.Runtime:
    """A runtime over a file tier; there can be one in a process."""
    directory = ROOT / "target" / "test-nvme-trainers"
    directory.mkdir(parents=True, exist_ok=True)
    return dormouse.Runtime(nvme_dir=directory, nvme_file_bytes=nvme_file_bytes)


@pytest.fixture(scope="session")
def runtime():
    with a_runtime() as runtime:
        yield runtime
