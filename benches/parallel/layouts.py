"""One rank of all layouts of python/tests_megatron/case_table.py with as many: ``layouts.py DIRECTORY DTYPE``.

Leaves ``RANK.json``: of each case the ratios of method §10 over this rank's parameters, and the bytes
planned and sent, of a stage in each call, of a context-parallel rank in each pass of a prompt. With the environment of torchrun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests_megatron")]

import torch.distributed as dist  # noqa: E402
import worker  # noqa: E402

from dormouse.demo import gradcheck  # noqa: E402

FIGURES = ("ratio_max", "ratio_p99", "ratio_global", "dense_global", "within_bounds", "worst_parameter")


def described(name: str, dtype: str, found: dict) -> dict:
    ways = (found[way]["gradients"] for way in ("truth", "plain", "shared"))
    runs = [
        gradcheck.distances_of(exact.items(), plain, shared)
        for exact, plain, shared in zip(*ways, strict=True)
    ]
    error = gradcheck.compare_runs(runs)
    figures = {figure: getattr(error, figure) for figure in FIGURES}
    return {"name": name, "dtype": dtype, "bytes": found["shared"]["bytes"], **figures}


def main(directory: Path, dtype: str) -> None:
    found = worker.of_cases(getattr(torch, dtype))
    rows = [described(name, dtype, each) for name, each in found.items()]
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
