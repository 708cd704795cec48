"""What the by-copy tests share: a step with and without hooks, and what left meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dormouse.modes.copying import SavedTensorOffload

HERE = Path(__file__).resolve().parent
ALONE_SECONDS_MAX = 240

ROWS = 64
STORAGE_BYTES = ROWS * ROWS * 4  # of one matrix of the tests


def stashed_bytes(runtime) -> int:
    """Bytes of saved tensors in the tiers. What Python only collects in time is collected."""
    gc.collect()
    tiers = runtime.stats()["tiers"]
    return tiers["host"]["current_bytes"] + tiers["nvme"]["current_bytes"]


@contextlib.contextmanager
def moved(runtime) -> Iterator[types.SimpleNamespace]:
    """Bytes copied ``out`` and ``back`` inside, once it is left."""
    seen = types.SimpleNamespace()
    before = runtime.stats()["copies"]
    yield seen
    after = runtime.stats()["copies"]
    for name, way in (("out", "device_to_host"), ("back", "host_to_device")):
        setattr(seen, name, after[way]["bytes"] - before[way]["bytes"])


def matrix() -> torch.Tensor:
    """The leaf of a step: finite, of both signs, no two elements alike."""
    return torch.linspace(-1, 1, ROWS * ROWS).view(ROWS, ROWS).clone().requires_grad_()


def on(memory: bytearray, value: float) -> torch.Tensor:
    """A new tensor of ``value`` that lies in ``memory``, whatever lay there before."""
    return torch.frombuffer(memory, dtype=torch.float32).view(ROWS, ROWS).fill_(value)


def gradient(make: Callable, hooks=None) -> torch.Tensor:
    """The leaf's gradient of one step through ``make``, its forward inside ``hooks``."""
    leaf = matrix()
    with hooks or contextlib.nullcontext():
        # By nobody's hand: what somebody keeps need not come back.
        total = make(leaf).float().sum()
    total.backward()
    return leaf.grad


def same_bits(runtime, make: Callable, **options) -> types.SimpleNamespace:
    """Holds a step with hooks against one without, bit for bit; gives the bytes moved."""
    awake = gradient(make)
    assert awake.any()
    with moved(runtime) as seen:
        copied = gradient(make, SavedTensorOffload(runtime, **({"min_bytes": 0} | options)).hooks())
    assert torch.equal(copied, awake)
    return seen


def alone(test: Callable) -> Callable:
    """Runs the test in a process of its own, for runtimes and settings that would outlive it."""

    def run():
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        code = f"import {test.__module__} as tests; tests.{test.__name__}.body()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=ALONE_SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr

    run.body = test
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
