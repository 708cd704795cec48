"""One runtime over a file tier for all tests, in a process whose memory dormouse serves."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch

import dormouse

ROOT = Path(__file__).resolve().parents[2]
NVME_DIR = ROOT / "target" / "test-nvme"
NVME_FILE_BYTES = 1 << 30
# The window where nothing is measured. An automatic one grows on a busy machine, and then less sleeps.
WINDOW_LAYERS = 3


def pytest_addoption(parser):
    parser.addoption(
        "--few-cases",
        action="store_true",
        help="each test in the first of its cases alone, and none that is marked slow",
    )


def pytest_configure(config):
    # Tiny matrices: a second thread only waits.
    torch.set_num_threads(1)
    if "libdormouse_preload.so" not in os.environ.get("LD_PRELOAD", ""):
        pytest.exit("these tests sleep in place: run them with `make test-python`", returncode=2)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--few-cases"):
        return
    taken, kept, left = set(), [], []
    for item in items:
        test = item.parent.nodeid, item.originalname
        is_left = test in taken or item.get_closest_marker("slow")
        (left if is_left else kept).append(item)
        taken.add(test)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish(session):
    # Else every full collection walks what importing has made.
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def a_runtime(nvme_file_bytes: int = NVME_FILE_BYTES):
    """A runtime over a file tier; there can be one in a process."""
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    settings = {"nvme_file_bytes": nvme_file_bytes, "window_layers": WINDOW_LAYERS}
    with dormouse.Runtime(nvme_dir=NVME_DIR, **settings) as runtime:
        info = runtime.info()
        assert "preload" in info["modes"] and "nvme" in info["tiers"], info
        yield runtime


@pytest.fixture(scope="session")
def runtime():
    with a_runtime() as runtime:
        yield runtime
        # Tracebacks of expected errors hold graphs, and those hold stashes.
        gc.collect()
