"""The example scripts run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import TO_COMPILE, ROOT

SECONDS_MAX = 400
EXAMPLES = ROOT / "examples"
# Of examples/deepspeed: rank, update, reward, norm of the gradients.
LINE = re.compile(r"rank (\d): update (\d): reward=([\d.]+), norm=([\d.]+)")


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


def test_deepspeed_scripts_have_the_same_first_gradients(tmp_path):
    found = {}
    for name in ("train", "train_shared"):
        script = EXAMPLES / "deepspeed" / f"{name}.py"
        command = ("-m", "torch.distributed.run", "--nproc-per-node", 2, script)
        lines = output_of(tmp_path, *command, **TO_COMPILE)
        found[name] = sorted(LINE.findall(lines))
        assert len(found[name]) == 10
    for plain, shared in zip(*found.values(), strict=True):
        assert plain[:2] == shared[:2]
        if plain[1] == "0":
            # The same responses; norms are printed with four decimals.
            assert plain[2] == shared[2]
            assert float(plain[3]) == pytest.approx(float(shared[3]), rel=1e-3)
