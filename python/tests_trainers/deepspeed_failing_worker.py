"""One rank of test_deepspeed_engine.py: rank 0's loss raises, and rank 1 runs its backward.

``python deepspeed_failing_worker.py DIRECTORY STAGE``, with the environment of torchrun, leaves
``error.RANK`` there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import conftest
import deepspeed_cases as cases
import torch
import torch.distributed as dist

from dormouse import fail_together
from dormouse.hf import SharedPrefix


def main(directory: Path, stage: int) -> None:
    torch.set_num_threads(1)
    cases.join_ranks()
    rank = int(os.environ["RANK"])
    case = cases.Case(stage)
    engine = cases.engine_of(case)
    ids, mask, keep = cases.batch_of(rank, 2)
    with conftest.a_runtime(64 << 20) as runtime:
        shared = SharedPrefix(engine, runtime)
        try:
            with fail_together():
                # A rank that enters after rank 0's end hears of that end, not of the error.
                dist.barrier()
                scores = shared.score(ids, mask, keep=keep)
                if rank == 0:
                    raise ValueError("a loss of one rank")
                engine.backward(scores.log_probabilities.sum())
        except Exception as error:
            (directory / f"error.{rank}").write_text(f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
