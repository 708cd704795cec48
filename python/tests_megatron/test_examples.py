"""The example scripts train: Megatron's optimizer finds the same gradients in both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from train import MICROBATCHES, ROWS, UPDATES

SECONDS_MAX = 400
EXAMPLES = ROOT / "examples" / "megatron"
WATCHED = Path(__file__).with_name("watched_example.py")
LINE = re.compile(r"rank (\d): update (\d): loss=(-?[\d.]+), norm=([\d.]+)")
SHARED = re.compile(r"rank (\d): (\d+) prompts of (\d+) rows")
RANKS = 2


def ranks_of(*script) -> str:
    """Returns what the ranks of a script printed."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", RANKS, *script)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_scripts_train_alike_and_one_shares():
    plain = ranks_of(EXAMPLES / "train.py")
    shared = ranks_of(WATCHED, EXAMPLES / "train_shared.py")
    lines = [sorted(LINE.findall(each)) for each in (plain, shared)]
    assert [len(each) for each in lines] == [RANKS * UPDATES] * 2
    for own, other in zip(*lines, strict=True):
        assert own[:2] == other[:2]
        # Printed with five decimals.
        figures = (list(map(float, each[2:])) for each in (own, other))
        assert next(figures) == pytest.approx(next(figures), abs=5e-5)
    # One prompt an update; none of a call that ran as in Megatron.
    counts = (str(UPDATES), str(UPDATES * MICROBATCHES * ROWS))
    assert sorted(SHARED.findall(shared)) == [(str(rank), *counts) for rank in range(RANKS)]
