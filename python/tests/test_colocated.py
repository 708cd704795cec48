"""The example of a rollout engine and a trainer that sleep in turn (examples/colocated)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import NVME_DIR, ROOT

SCRIPT = ROOT / "examples" / "colocated" / "train.py"
SECONDS_MAX = 200
# Smaller requests are not the heap's, and do not sleep.
HEAP_MIN_BYTES = 64 << 10
LINE = re.compile(r"update (\d): reward=([\d.]+), in_rollout=(\d+), in_training=(\d+)")
# Runs the script; then tells the sum of each weight's bits, and the bytes of the heap's blocks.
RUN = f"""
import runpy, dormouse, torch
{{patch}}
found = runpy.run_path({str(SCRIPT)!r})
caches, states = found["cache"].layers, found["optimizer"].state.values()
print("digest", *(p.detach().view(torch.int32).sum().item() for p in found["policy"].parameters()))
for name, tensors in {{{{
    "weights": found["engine"].parameters(),
    "kv_cache": [tensor for each in caches for tensor in (each.keys, each.values)],
    "optimizer": [tensor for each in states for tensor in each.values()],
}}}}.items():
    print(name, sum(tensor.nbytes for tensor in tensors if tensor.nbytes >= {HEAP_MIN_BYTES}))
"""
ASLEEP = ""
AWAKE = "dormouse.Tag.sleep = lambda self, tier='nvme': None"


def output_of(patch: str) -> str:
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(patch=patch)],
        cwd=NVME_DIR,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(output: str, name: str) -> list[int]:
    (line,) = (each for each in output.splitlines() if each.startswith(name))
    return list(map(int, line.split()[1:]))


@pytest.mark.slow
def test_each_sleeps_while_the_other_works_and_nothing_changes():
    asleep, awake = output_of(ASLEEP), output_of(AWAKE)
    updates, others = LINE.findall(asleep), LINE.findall(awake)
    assert len(updates) == len(others) == 4
    # Rewards, and then every weight's bits.
    assert [each[:2] for each in updates] == [each[:2] for each in others]
    assert told(asleep, "digest") == told(awake, "digest")
    assert all(each[2:] == ("0", "0") for each in others)
    (weights,), (kv_cache,), (optimizer,) = (
        told(asleep, name) for name in ("weights", "kv_cache", "optimizer")
    )
    # There are no moments before the first step.
    in_rollout = [0, *[optimizer] * 3]
    assert [int(each[2]) for each in updates] == in_rollout
    assert [int(each[3]) for each in updates] == [weights + kv_cache] * 4
