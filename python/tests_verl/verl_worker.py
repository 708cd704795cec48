"""One rank of test_ranks.py: ``verl_worker.py DIRECTORY KIND RANKS_OF_SHARDS``, of which KIND is
``plain``, ``shared``, or one of:

- ``plain-short``, ``shared-short``: prompts of rank 1 have one token;
- ``failing``: rank 1's second loss raises, and each rank leaves its error.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples" / "verl")]

import on_cpu
import pytest
import torch
from verl.utils import tensordict_utils
from verl_runs import PROMPTS, batch_of, exact, made, run

import dormouse

# Of each rank: prompts and lengths. One shares prompts and the other none; the second has a row
# without a response.
ROWS = (((0, 4), (0, 6), (0, 1), (0, 8)), ((0, 3), (1, 5), (2, 2), (2, 0)))


def error_of(worker, rank: int) -> str:
    """Returns the error of an update."""
    loss, losses = worker.loss_fn, []

    def failing(**arguments):
        losses.append(0)
        if rank == 1 and len(losses) == 2:
            raise ValueError("a loss of one rank")
        return loss(**arguments)

    worker.set_loss_fn(failing)
    data = batch_of(ROWS[rank])
    tensordict_utils.assign_non_tensor(data, global_batch_size=8, calculate_entropy=True)
    try:
        worker.train_batch(data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(directory: Path, kind: str, ranks_of_shards: int) -> None:
    torch.set_num_threads(1)
    with on_cpu.process_group(), pytest.MonkeyPatch.context() as monkeypatch:
        rank = torch.distributed.get_rank()
        exact(monkeypatch)
        runtime = None if kind.startswith("plain") else dormouse.Runtime()
        engine = {
            "micro_batch_size_per_gpu": 1,
            "infer_micro_batch_size_per_gpu": 1,
            "fsdp_size": ranks_of_shards,
        }
        settings = {"engine": engine, "actor": {"entropy_coeff": 0.1}}
        if kind == "failing":
            worker = made(monkeypatch, directory / "model", runtime=runtime, **settings)
            error = error_of(worker, rank)
            (directory / f"{kind}.{rank}").write_text(error)
            runtime.close()
            return
        is_short = kind.endswith("short") and rank == 1
        prompts = (1, 1, 1) if is_short else PROMPTS
        left = run(
            monkeypatch,
            directory / "model",
            runtime=runtime,
            batch={"prompts": prompts, "rows": ROWS[rank], "seed": 7 + rank},
            **settings,
        )
        torch.save(vars(left), directory / f"{kind}.{rank}")
        if runtime is not None:
            runtime.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
