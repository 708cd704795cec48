"""One rank of test_ranks.py: ``verl_worker.py DIRECTORY plain|shared RANKS_OF_SHARDS``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples" / "verl")]

import on_cpu
import pytest
import torch
from verl_runs import exact, run

import dormouse

# Of each rank: prompts and lengths. One shares prompts and the other none; the second has a row
# without a response.
ROWS = (((0, 4), (0, 6), (0, 1), (0, 8)), ((0, 3), (1, 5), (2, 2), (2, 0)))


def main(directory: Path, kind: str, ranks_of_shards: int) -> None:
    torch.set_num_threads(1)
    with on_cpu.process_group(), pytest.MonkeyPatch.context() as monkeypatch:
        rank = torch.distributed.get_rank()
        exact(monkeypatch)
        runtime = dormouse.Runtime() if kind == "shared" else None
        left = run(
            monkeypatch,
            directory / "model",
            runtime=runtime,
            batch={"rows": ROWS[rank], "seed": 7 + rank},
            engine={
                "micro_batch_size_per_gpu": 1,
                "infer_micro_batch_size_per_gpu": 1,
                "fsdp_size": ranks_of_shards,
            },
            actor={"entropy_coeff": 0.1},
        )
        torch.save(vars(left), directory / f"{kind}.{rank}")
        if runtime is not None:
            runtime.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
