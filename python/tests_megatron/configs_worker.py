"""One rank of test_configs.py, over gloo: parts of a model with a configuration each.

``python configs_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
of each of :data:`CASES` with this many ranks, gradients and what was logged, both ways.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import conftest
import torch
import torch.distributed as dist

import cases
from case_table import tripled

SCALE = {"grad_scale_func": tripled}
NAMES = (
    "two stages of two chunks of two replicas",
    "two stages of two chunks, experts, balanced, prompts in chunks",
    "two stages of two chunks, two replicas, balanced over both",
)
CASES = {
    name: dataclasses.replace(case, own_configs=True, config=case.config | SCALE)
    for name, case in cases.CASES.items()
    if name in NAMES
}
LEFT = ("gradients", "losses", "balance")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, case in CASES.items():
            if case.ranks != int(os.environ["WORLD_SIZE"]):
                continue
            cases.join(case)
            ways = {"plain": None, "shared": runtime}
            of_ways = {way: cases.trained(case, each) for way, each in ways.items()}
            found[name] = {
                way: {key: own[key] for key in LEFT} for way, own in of_ways.items()
            }
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
