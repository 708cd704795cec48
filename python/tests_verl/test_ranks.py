"""verl's actor on two ranks over gloo, under fully_shard."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import distance
from verl_runs import differences, saved

WORKER = Path(__file__).with_name("verl_worker.py")
WORKER_SECONDS_MAX = 300
RANKS = 2
EXACT = 1e-10


def run_ranks(directory: Path, kind: str, ranks_of_shards: int) -> None:
    """Runs the ranks of a world; each leaves something."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), kind, str(ranks_of_shards)],
            env=os.environ
            | {key: str(value) for key, value in meeting.items()}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        codes = [worker.wait(WORKER_SECONDS_MAX) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * RANKS


def left_by_ranks(directory: Path, kind: str, ranks_of_shards: int) -> list[dict]:
    run_ranks(directory, kind, ranks_of_shards)
    return [torch.load(directory / f"{kind}.{rank}", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("ranks_of_shards", [2, 1])
def test_two_ranks(ranks_of_shards, tmp_path):
    """Weights sharded over both; or each with all of them, on a mesh of two dimensions."""
    saved(tmp_path / "model")
    plain, shared = (left_by_ranks(tmp_path, kind, ranks_of_shards) for kind in ("plain", "shared"))
    assert_equal(shared, plain)
    assert [each["sharing"].prompts < each["sharing"].rows for each in shared] == [True, False]


def test_ranks_run_as_in_verl_if_one_has_a_prompt_of_one_token(tmp_path):
    """Else one would wait in a collective that the other does not enter."""
    saved(tmp_path / "model")
    kinds = ("plain-short", "shared-short")
    plain, shared = (left_by_ranks(tmp_path, kind, RANKS) for kind in kinds)
    assert_equal(shared, plain)
    assert [each["sharing"].rows for each in shared] == [0, 0]


def assert_equal(shared: list[dict], plain: list[dict]) -> None:
    for ours, own in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours["log_probs"], own["log_probs"], rtol=0, atol=EXACT)
        assert len(ours["gradients"]) == len(own["gradients"]) == 4
        for one, other in zip(ours["gradients"], own["gradients"], strict=True):
            assert distance(one, other) < EXACT
        assert distance(ours["weights"], own["weights"]) < EXACT
        assert not differences(ours["metrics"], own["metrics"], EXACT)


def test_an_error_of_one_rank_is_told(tmp_path):
    saved(tmp_path / "model")
    run_ranks(tmp_path, "failing", RANKS)
    error = "ValueError: a loss of one rank"
    assert (tmp_path / "failing.1").read_text() == error
    assert (tmp_path / "failing.0").read_text() == f"RankFailedError: rank 1 failed: {error}"
