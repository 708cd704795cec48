"""The example scripts train: Megatron's optimizer finds the same gradients in both."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

SECONDS_MAX = 400
EXAMPLES = ROOT / "examples" / "megatron"
LINE = re.compile(r"rank (\d): update (\d): loss=(-?[\d.]+), norm=([\d.]+)")
RANKS, UPDATES = 2, 5


def test_both_scripts_train_alike():
    found = {}
    for name in ("train", "train_shared"):
        script = EXAMPLES / f"{name}.py"
        command = ("-m", "torch.distributed.run", "--nproc-per-node", RANKS, script)
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found[name] = sorted(LINE.findall(done.stdout))
        assert len(found[name]) == RANKS * UPDATES
    for plain, shared in zip(*found.values(), strict=True):
        assert plain[:2] == shared[:2]
        # Printed with five decimals.
        figures = (list(map(float, each[2:])) for each in (plain, shared))
        assert next(figures) == pytest.approx(next(figures), abs=5e-5)
