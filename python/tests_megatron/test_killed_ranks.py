"""A rank that is killed in a call of the schedule: the others are told, keep nothing of the call,
and train on without it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from killed_worker import KILLED

from in_use import has_last_layer_alone
from rank_workers import run_ranks

WORKER = Path(__file__).with_name("killed_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10
# Between a death and the errors of the other ranks.
TOLD_S_MAX = 10.0


@pytest.mark.parametrize("name, killed", [
    ("stages", 0),
    ("stages", 1),
    ("chunks", 1),
    ("four stages", 2),
    ("parts", 0),
    ("replicas", 1),
    ("experts", 1),
    ("context", 0),
    ("context, ring", 1),
])
def test_the_others_go_on_without_a_rank_that_is_killed(name, killed, tmp_path):
    ranks = KILLED[name].ranks
    codes = run_ranks(WORKER, tmp_path, name, killed, ranks=ranks, seconds_max=SECONDS_MAX)
    others = [rank for rank in range(ranks) if rank != killed]
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(ranks)]
    died_s = torch.load(tmp_path / "killed.pt")
    for rank in others:
        own = torch.load(tmp_path / f"{rank}.pt")
        assert (own["asleep_before"] > 0) != has_last_layer_alone(KILLED[name], rank)
        assert own["error"] == f"RankFailedError: rank {killed} failed: its process ended"
        assert 0 < own["told_s"] - died_s <= TOLD_S_MAX
        assert own["asleep"] == 0
        assert own["stays"] < own["gradient_bytes"]
        assert own["distance"] < EXACT
        assert own["next"] < EXACT and own["next_asleep"] > 0
