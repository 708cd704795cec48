"""TRL's trainer with shared prompts on two ranks, in DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from models import distance
from trl_runs import same_logs, saved

WORKER = Path(__file__).with_name("trl_worker.py")
WORKER_SECONDS_MAX = 300
RANKS = 2


def run_ranks(directory: Path, kind: str) -> list:
    """Returns what each rank left."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), kind],
            env=os.environ
            | {key: str(value) for key, value in meeting.items()}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"},
        )
        for rank in range(RANKS)
    ]
    try:
        codes = [worker.wait(WORKER_SECONDS_MAX) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * RANKS
    return [torch.load(directory / f"{kind}.{rank}") for rank in range(RANKS)]


def test_gradients_are_those_of_the_plain_trainer(tmp_path):
    """In some windows of four rows one rank shares a prompt and the other none."""
    saved(tmp_path / "model")
    plain, shared = (run_ranks(tmp_path, kind) for kind in ("plain", "shared"))
    for rank in range(RANKS):
        assert len(shared[rank][0]) == len(plain[0][0]) == 3
        for ours, own in zip(shared[rank][0], plain[0][0], strict=True):
            assert distance(ours, own) < 1e-10
    assert not same_logs(plain[0][1], shared[0][1], 1e-6)
    assert any(rows for _, _, rows in shared)
