"""The example scripts run, and differ in few lines."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys

import pytest
from conftest import ROOT

EXAMPLES = ROOT / "examples" / "verl"
SECONDS_MAX = 300
LINES_MAX = 10


def losses(name: str, folder) -> list[float]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    # Not the process group of these tests.
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_PORT")}
    own["PYTHONPATH"] = str(ROOT / "python")
    done = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]


def test_both_scripts_train_alike(tmp_path):
    plain, shared = losses("actor", tmp_path), losses("actor_shared", tmp_path)
    assert len(plain) == 4
    assert shared == pytest.approx(plain, abs=1e-4)


def test_the_scripts_differ_in_few_lines():
    names = ("actor.py", "actor_shared.py")
    scripts = [(EXAMPLES / name).read_text().splitlines() for name in names]
    changed = [
        line
        for line in difflib.unified_diff(*scripts, n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert 1 <= len(changed) <= LINES_MAX
