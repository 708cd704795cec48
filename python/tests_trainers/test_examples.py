"""The example scripts run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import TO_COMPILE, ROOT

SECONDS_MAX = 400
EXAMPLES = ROOT / "examples"


def output_of(directory, *command, **environment) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["grpo", "grpo_shared"])
def test_the_script_trains(name, tmp_path):
    assert output_of(tmp_path, EXAMPLES / "trl" / f"{name}.py").count("'entropy'") == 5


def test_deepspeed_scripts_see_the_same_rewards(tmp_path):
    """The first update has the same gradients, and a few tokens differ after it at the most."""
    found = {}
    for name in ("train", "train_shared"):
        script = EXAMPLES / "deepspeed" / f"{name}.py"
        command = ("-m", "torch.distributed.run", "--nproc-per-node", 2, script)
        lines = output_of(tmp_path, *command, **TO_COMPILE).splitlines()
        found[name] = sorted(line for line in lines if line.startswith("rank"))
        assert len(found[name]) == 10
    first = [[line for line in lines if "update 0" in line] for lines in found.values()]
    assert first[0] == first[1] and len(first[0]) == 2
