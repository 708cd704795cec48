"""One rank of test_trl_precision.py: ``python trl_precision_worker.py DIRECTORY``, with the
environment of torchrun. See precision.py."""

from __future__ import annotations

import sys
from pathlib import Path

import conftest
import pytest
import torch
from precision import Case, Gradients, leave
from trl_runs import Fp64Head, PlainGRPO, run

import dormouse.trl

# Long enough that what a layer saves of a prompt are blocks that sleep, in BF16 too.
PROMPT_TOKENS = 320


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:

        def gradients_of(case: Case, way: str, model: torch.nn.Module) -> Gradients:
            kind = dormouse.trl.share(PlainGRPO, runtime=runtime) if way == "shared" else PlainGRPO
            with pytest.MonkeyPatch.context() as patches:
                if way == "truth":
                    patches.setattr("trl.trainer.utils._ChunkedLogProbFunction", Fp64Head)
                trainer, recorder = run(
                    kind,
                    model,
                    directory / f"output.{way}",
                    shortest=PROMPT_TOKENS,
                    loss_type="dapo",
                    per_device_train_batch_size=1,
                    bf16=case.autocast,
                    **({"router_aux_loss_coef": 0.0} if case.experts else {}),
                )
            assert way != "shared" or trainer.sharing.rows
            return recorder.gradients

        leave(directory, runtime, gradients_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
