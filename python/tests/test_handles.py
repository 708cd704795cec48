"""Handles that were never closed, and handles whose close failed after it destroyed them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NVME_DIR

ALONE_SECONDS_MAX = 120

# A runtime is finalized before what it refers to: it is the older one.
CYCLE = """
import ctypes, gc, torch, dormouse
from dormouse.modes.copying import _Copy
from dormouse.runtime import Prefix, _left_runtimes

def stash(runtime):
    copy = _Copy(runtime, torch.ones(1 << 20))
    assert copy._id.value and not copy.is_declined
    return copy

MAKE = {
    "tag": lambda runtime: runtime.tag("of a cycle"),
    "prefix": lambda runtime: Prefix(runtime, None, 1),
    "stash": stash,
}
gc.disable()
runtime = dormouse.Runtime()
runtime.other = MAKE[KIND](runtime)
if KEPT:
    kept = runtime.tag("kept")
    # The cycle is all that holds the runtime.
    kept._runtime = None
del runtime
gc.collect()
if KEPT:
    assert len(_left_runtimes) == 1
    try:
        dormouse.Runtime()
    except dormouse.StateError as error:
        assert error.status == -502
    else:
        raise AssertionError("two runtimes of a device")
    kept.close()
assert not _left_runtimes
dormouse.Runtime().close()
"""

LOST = """
import os, time, torch, dormouse
from pathlib import Path
from dormouse import _native as native
from dormouse.runtime import Prefix

with dormouse.Runtime(nvme_dir=DIR, nvme_file_bytes=64 << 20, host_budget_bytes=8 << 20) as runtime:
    runtime.set_budget("host", 0)
    prefix = Prefix(runtime, None, 2)
    prefix.enter(native.Phase.A)
    tensors = []
    for layer in range(2):
        prefix.mark(native.Edge.FORWARD_BEGIN, layer)
        tensors.append(torch.arange(1 << 17).mul_(11))
        prefix.dormant(layer, [tensors[layer].data_ptr()])
        prefix.mark(native.Edge.FORWARD_END, layer)
    prefix.enter(native.Phase.B)
    deadline = time.monotonic() + 60
    while runtime.query(tensors[0].data_ptr())["state"] != "nvme":
        assert time.monotonic() < deadline, runtime.query(tensors[0].data_ptr())
    links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    targets = {str(link.readlink()): link for link in links}
    (file,) = [
        link
        for target, link in targets.items()
        if target.startswith(DIR) and target.endswith("(deleted)")
    ]
    os.truncate(file, 0)
    try:
        prefix.close()
    except dormouse.StorageError as error:
        assert error.status == -401, error
    else:
        raise AssertionError("what the file lost was woken")
    prefix.close()
"""


def run(script: str, **values) -> None:
    names = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    done = subprocess.run(
        [sys.executable, "-c", names + script],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
        timeout=ALONE_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["tag", "prefix", "stash"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_runtime_collected_with_what_uses_it_is_destroyed(kind, kept):
    run(CYCLE, KIND=kind, KEPT=kept)


def test_a_prefix_whose_memory_is_lost_is_closed_once():
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    run(LOST, DIR=str(NVME_DIR))
