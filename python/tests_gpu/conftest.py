"""Real PyTorch on a GPU, or on the stand-in: a stand-in driver under a stand-in CUDA runtime.

`make test-gpu` runs these tests on the stand-in, which is held here to what CUDA and torch's own
allocator promise, so that a test of ours which passes on it means something. Kernels do nothing
there, hence every check is of bytes that copies moved, of order, or of counts. On a GPU
`scripts/gpu-suite --only tests` runs them; a test that needs the stand-in is skipped and says why.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Of torch's statistics, what 2.11 does not have.
NEW_STATS = {"num_oom_rejections"}
STANDIN = "stand-in"  # in the name of the device
IS_STANDIN = hasattr(ctypes.CDLL(None), "standin_cudart_unsupported")
# What the driver's figure of free memory may be off by: on a GPU it takes some for kernels, streams
# and pinned memory when they are first used.
SLACK_BYTES = 0 if IS_STANDIN else 16 << 20
REUSED_BYTES = 30 << 20  # a block of its own in torch's allocator
PATIENCE_S = 20  # for what other threads do by themselves
LATE_MS = 300  # how long work is that comes late
CYCLES_PER_MS = 1_980_000  # of torch.cuda._sleep
SCRIPT_SECONDS_MAX = 120


def pytest_configure(config):
    problem = no_gpu()
    if problem:
        pytest.exit(f"these tests want a GPU or, `make test-gpu`, the stand-in: {problem}", 2)
    torch.set_num_threads(1)


def no_gpu() -> str | None:
    """What is wrong with this process; None if torch has a GPU and its runtime."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    name = torch.cuda.get_device_name()
    if (STANDIN in name.lower()) != IS_STANDIN:
        runtime = "the stand-in's" if IS_STANDIN else "not the stand-in's"
        return f"the GPU is {name}, the CUDA runtime is {runtime}"
    return None


def standin_only(why: str):
    """Marks a test that says nothing on a GPU."""
    return pytest.mark.skipif(not IS_STANDIN, reason=f"stand-in only: {why}")


def skip_without_standin(environment: dict[str, str]) -> None:
    """Skips a test whose variables only the stand-in reads."""
    told = [name for name in environment if name.startswith("STANDIN_")]
    if told and not IS_STANDIN:
        pytest.skip(f"stand-in only: a GPU does not read {', '.join(told)}")


def alike(seen: int, wanted: int) -> bool:
    """Whether two figures of the driver's free memory are the same, as far as it says."""
    return abs(seen - wanted) <= SLACK_BYTES


def unsupported_calls() -> set[str]:
    """The runtime calls that were made so far and that the stand-in does not have."""
    if not IS_STANDIN:
        return set()
    tell = ctypes.CDLL(None).standin_cudart_unsupported
    tell.argtypes, tell.restype = [ctypes.c_size_t], ctypes.c_char_p
    return {name.decode() for name in iter(map(tell, itertools.count()).__next__, None)}


@pytest.fixture(autouse=True)
def quiet_gpu():
    """Each test finds an idle device and an empty cache, and calls nothing that is not there."""
    before = unsupported_calls()
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert unsupported_calls() == before


def busy(ms: float) -> None:
    """Keeps the current stream busy for about that long."""
    torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def reuse_after(side, *, recorded: bool) -> tuple[bool, bool]:
    """Whether a block in use on ``side`` is handed out again before and after ``side`` is done."""
    torch.cuda.empty_cache()
    block = torch.empty(REUSED_BYTES, dtype=torch.uint8, device="cuda")
    address = block.data_ptr()
    with torch.cuda.stream(side):
        busy(LATE_MS)
        if recorded:
            block.record_stream(side)
    del block
    early = torch.empty(REUSED_BYTES, dtype=torch.uint8, device="cuda")
    assert not side.query()
    side.synchronize()
    late = torch.empty(REUSED_BYTES, dtype=torch.uint8, device="cuda")
    return early.data_ptr() == address, late.data_ptr() == address


def settled(runtime, host_bytes: int = 0) -> dict:
    """The figures once all host buffers but ``host_bytes`` are given back: a thread hears of their
    last copies' end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        stats = runtime.stats()
        if stats["tiers"]["host"]["current_bytes"] <= host_bytes or time.monotonic() > deadline:
            return stats
        time.sleep(0.001)


def random_bytes(count: int, *, pinned: bool = False, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.pin_memory() if pinned else data


def run_script(code: str, **environment: str) -> str:
    """Runs ``code`` in a process of its own, which must succeed and complain of nothing."""
    skip_without_standin(environment)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS_MAX,
    )
    check_quiet(done)
    return done.stdout


def check_quiet(done: subprocess.CompletedProcess) -> None:
    """Fails unless the process succeeded and wrote nothing to standard error."""
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}: {done.stderr}"
