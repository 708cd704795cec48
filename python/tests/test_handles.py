"""What becomes of handles that nobody closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
