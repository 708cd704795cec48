"""One rank of test_replica_lists.py, over gloo.

``python replica_lists_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: what each of :data:`CASES` returns.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import dormouse.megatron
import long_rows
from dormouse.megatron.pipelined import run_pipelined
from models import distance

STAGES = cases.Case(
    4,
    stages=2,
    config=long_rows.CONFIG,
    share={"microbatch_tokens": 260, "across_replicas": True},
)
# The even cut by work is in the second prompt; whole, each replica has a long and a short one.
EVEN = (500, 460, 150, 110)
# Whole, one replica has two of them.
ODD = (200, 180, 160)
CASES = {"even": EVEN, "odd": ODD}


def figures_of(prompts: tuple[int, ...], runtime) -> dict:
    """Returns of each call how many rows of each group this rank's replica ran, and how far the
    second one's gradients and losses are from Megatron's own."""
    cases.join(STAGES)
    chunks = cases.chunks_of(STAGES)
    # Replicas have the same rows, with other weights in the loss.
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    batches = long_rows.batches_of(prompts)
    for batch in batches:
        batch["weights"] = torch.randn(len(batch["weights"]), 1, generator=generator)
    function = get_forward_backward_func()
    shared = dormouse.megatron.share(function, runtime=runtime, **STAGES.share)
    run = functools.partial(cases.run, STAGES, ddp=chunks, batches=batches)
    ran: list[list[int]] = []

    def recorded(parts, last, context, own, work, *others):
        ran.append([len(each.rows) for each in work.places])
        return run_pipelined(parts, last, context, own, work, *others)

    with mock.patch("dormouse.megatron.forward_backward.run_pipelined", recorded):
        run(shared)
        losses = run(shared)
        gradients = cases.gradients(chunks)
        run(shared, forward_only=True)
    own_losses = run(function)
    pairs = zip(losses, own_losses, strict=True)
    return {
        "ran": ran,
        "distance": distance(cases.gradients(chunks), gradients),
        "losses": [(one["loss"].item(), other["loss"].item()) for one, other in pairs],
    }


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: figures_of(prompts, runtime) for name, prompts in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
