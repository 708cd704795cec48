"""One rank of test_precision.py: ``python verl_precision_worker.py DIRECTORY``, with the environment
of torchrun. See precision.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples" / "verl")]

import on_cpu
import pytest
import torch
from precision import Case, Gradients, leave
from verl_runs import FP64, ROWS, exact, run

import dormouse

# Long enough that what a layer saves of them are blocks that sleep, in BF16 too.
PROMPTS = (340, 330, 320)
# Of one of two ranks: which prompt, and the response's length.
SHARING = ROWS[:4]
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
# A token whose ratio rounding moves over an edge would hide what is compared.
CLIPPED = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
UNCLIPPED = dict.fromkeys(CLIPPED, 1e4)


def engine_of(case: Case) -> dict:
    computed = "bf16" if case.autocast else NAMES[case.dtype]
    precision = FP64 if case.dtype is torch.float64 else {"reduce_dtype": "fp32"}
    return {
        "model_dtype": NAMES[case.dtype],
        "mixed_precision": precision | {"param_dtype": computed},
        "micro_batch_size_per_gpu": 1,
    }


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with on_cpu.process_group(), dormouse.Runtime() as runtime:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rows = ROWS if ranks == 1 else SHARING

        def gradients_of(case: Case, way: str, model: torch.nn.Module) -> Gradients:
            own = directory / f"model.{rank}"
            model.save_pretrained(own)
            with pytest.MonkeyPatch.context() as patches:
                if way == "truth":
                    exact(patches)
                left = run(
                    patches,
                    own,
                    runtime=runtime if way == "shared" else None,
                    batch={"rows": rows, "prompts": PROMPTS, "seed": 7 + rank},
                    engine=engine_of(case),
                    actor={"entropy_coeff": 0.1, **UNCLIPPED},
                    optimizer={"optimizer": "SGD"},
                )
            assert way != "shared" or left.sharing.rows
            return left.gradients

        leave(directory, runtime, gradients_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
