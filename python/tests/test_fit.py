"""Steps planned from the one before: the same gradients, and no more asleep than need be.

There can be one runtime in a process, so the steps run in one of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Room beside what a step keeps awake: some layers' worth, not all.
ROOM_OF_DORMANT = 0.5


def a_step(model, runtime, case, *, sleep: bool):
    from models import loss_fn, take_gradients

    from dormouse.hf import SharedPrefix

    report = SharedPrefix(model, runtime, sleep=sleep).backward(case, loss_fn, microbatch_tokens=40)
    return take_gradients(model), report.prefix


def steps() -> None:
    from conftest import a_runtime
    from models import group, tiny

    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    model = tiny(dtype=torch.float32, num_hidden_layers=8, **wide)
    case = group(600, (40, 24, 33, 8), seed=3)
    with a_runtime() as runtime:
        awake, _ = a_step(model, runtime, case, sleep=False)

        def asleep():
            gradients, node = a_step(model, runtime, case, sleep=True)
            assert all(torch.equal(gradients[name], awake[name]) for name in awake)
            return node

        first = asleep()
        assert not first["is_planned"]
        assert first["asleep_bytes_peak"] >= 0.95 * first["dormant_bytes"]
        roomy = asleep()
        assert roomy["is_planned"], roomy
        assert roomy["asleep_bytes_peak"] == 0 and "all fits" in roomy["declined"], roomy
        # Beside what is hot in B there is room for half of what may sleep.
        dormant = roomy["dormant_bytes"]
        hot = roomy["phase_peak_bytes"]["B"] - dormant
        runtime.trim()
        runtime.set_budget("device", int(1.1 * hot + ROOM_OF_DORMANT * dormant))
        fitted = asleep()
        assert fitted["is_planned"], fitted
        kept = fitted["planned_bytes"]["device"]
        assert 0 < kept < dormant, fitted
        assert fitted["planned_bytes"]["nvme"] >= 0.25 * dormant, fitted
        assert 0 < fitted["asleep_bytes_peak"], fitted
        assert fitted["written_bytes"] < first["written_bytes"], "less was moved"


@pytest.mark.slow
def test_a_planned_step_is_the_same_step_and_sleeps_less():
    environment = {**os.environ, "DORMOUSE_OFFLOAD_RESIDENCY": "fit"}
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    steps()
