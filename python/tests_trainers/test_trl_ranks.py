"""TRL's trainer with shared prompts on two ranks, in DistributedDataParallel over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
from models import distance
from rank_workers import RANKS, run_ranks
from trl_runs import same_logs, saved

WORKER = Path(__file__).with_name("trl_worker.py")
WORKER_SECONDS_MAX = 300


def codes_of(directory: Path, kind: str) -> list[int]:
    return run_ranks(
        WORKER, directory, kind, seconds_max=WORKER_SECONDS_MAX, ACCELERATE_USE_CPU="true"
    )


def left_by_ranks(directory: Path, kind: str) -> list:
    """Returns what each rank left."""
    assert codes_of(directory, kind) == [0] * RANKS
    return [torch.load(directory / f"{kind}.{rank}") for rank in range(RANKS)]


def test_gradients_are_those_of_the_plain_trainer(tmp_path):
    """In some windows of four rows one rank shares a prompt and the other none."""
    saved(tmp_path / "model")
    plain, shared = (left_by_ranks(tmp_path, kind) for kind in ("plain", "shared"))
    for rank in range(RANKS):
        assert len(shared[rank][0]) == len(plain[0][0]) == 3
        for ours, own in zip(shared[rank][0], plain[0][0], strict=True):
            assert distance(ours, own) < 1e-10
    assert not same_logs(plain[0][1], shared[0][1], 1e-6)
    assert any(rows for _, _, rows in shared)


def test_an_error_of_one_rank_is_told(tmp_path):
    """Without a word of the script's, and both processes end."""
    saved(tmp_path / "model")
    assert codes_of(tmp_path, "failing") == [1] * RANKS
    error = "ValueError: a loss of one rank"
    assert (tmp_path / "failing.1").read_text() == error
    assert (tmp_path / "failing.0").read_text() == f"RankFailedError: rank 1 failed: {error}"
