"""One rank of test_gradients.py: runs the cases of cases.py that have this many ranks.

``python worker.py DIRECTORY DTYPE [CASE...]``, with the environment of torchrun, leaves ``RANK.pt``
there: of each case, what :func:`cases.trained` returns, plain, shared, and of the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import conftest
import torch
import torch.distributed as dist

import cases


def main(directory: Path, dtype: torch.dtype, names: list[str]) -> None:
    torch.save(of_cases(dtype, names), directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def of_cases(dtype: torch.dtype, names: Sequence[str] = ()) -> dict[str, dict]:
    """Runs the cases with as many ranks as there are; ``names``: only these."""
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, case in cases.CASES.items():
            if names and name not in names:
                continue
            if case.ranks != int(conftest.os.environ["WORLD_SIZE"]):
                continue
            if dtype is not torch.float64 and not case.is_rounded:
                continue
            cases.join(case)
            found[name] = {
                "plain": cases.trained(case.of_dtype(dtype), None),
                "truth": cases.trained(case.truth_of(dtype), None),
                "shared": cases.trained(case.of_dtype(dtype), runtime),
            }
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:])
