"""One rank of test_trl_ranks.py: ``python trl_worker.py DIRECTORY KIND``, with the environment of
torchrun, leaves ``KIND.RANK`` there. ``failing``: a loss of rank 1 raises, and what each rank gets
is there."""

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


class Failing(PlainGRPO):
    """Whose third loss raises on rank 1, in the middle of an accumulation window."""

    losses = 0

    def compute_loss(self, *args, **named):
        self.losses += 1
        if self.accelerator.process_index == 1 and self.losses == 3:
            raise ValueError("a loss of one rank")
        return super().compute_loss(*args, **named)


def main(directory: Path, kind: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer_class = Failing if kind == "failing" else PlainGRPO
    if kind != "plain":
        trainer_class = dormouse.trl.share(trainer_class)
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
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except Exception as error:
        left = Path(sys.argv[1]) / f"{sys.argv[2]}.{os.environ['RANK']}"
        left.write_text(f"{type(error).__name__}: {error}")
        raise
