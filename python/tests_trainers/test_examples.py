"""The example scripts run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

SECONDS_MAX = 400


@pytest.mark.parametrize("name", ["grpo", "grpo_shared"])
def test_the_script_trains(name, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "trl" / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'entropy'") == 5
