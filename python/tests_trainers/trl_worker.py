"""One rank of test_trl_ranks.py: ``python trl_worker.py DIRECTORY KIND``, with the environment of
torchrun, leaves ``KIND.RANK`` there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import conftest  # noqa: F401 - paths
import pytest
import torch
from transformers import LlamaForCausalLM
from trl_runs import PlainGRPO, exact_all, run

import dormouse.trl


def main(directory: Path, kind: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer_class = PlainGRPO if kind == "plain" else dormouse.trl.share(PlainGRPO)
    with pytest.MonkeyPatch.context() as patches:
        exact_all(patches)
        model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float64)
        trainer, recorder = run(
            trainer_class,
            model,
            directory / f"{kind}.output.{rank}",
            loss_type="dapo",
            num_iterations=2,
            beta=0.1,
            perturb=0.02,
            per_device_train_batch_size=1,
        )
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    rows = trainer.sharing.rows if kind == "shared" else 0
    torch.save((recorder.gradients, recorder.logs, rows), directory / f"{kind}.{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
