"""One rank of test_replica_lists.py, over gloo.

``python replica_lists_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: what each of :data:`CASES` returns.
"""

from __future__ import annotations

import dataclasses
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
from dormouse.megatron.held import Held
from dormouse.megatron.pipelined import run_pipelined
from models import distance
from stage_peaks import read_peaks

# In this order the even cut by work is in the second group; whole, each replica has a long and a
# short one.
PROMPTS = (500, 500, 150, 150)
STAGES = cases.Case(
    4,
    stages=2,
    config=long_rows.CONFIG,
    share={"microbatch_tokens": 260, "across_replicas": True},
)
# As many microbatches as prompts.
OF_PROMPTS = {"microbatch_group_size_per_vp_stage": len(PROMPTS)}
CHUNKS = dataclasses.replace(
    STAGES, chunks=2, config=STAGES.config | cases.INTERLEAVED | OF_PROMPTS
)
CASES = {"two stages": STAGES, "two stages of two chunks": CHUNKS}
# Calls after one without figures: with room for all, with less on one stage of one replica alone,
# and that without a backward.
FREE, BOUND, EVALUATED = "free", "bound", "evaluated"
# Room of that stage over the planned peak.
ROOM_SHARE = 0.9


def figures_of(case: cases.Case, runtime) -> dict:
    """Returns of each call the prompts and rows that this rank's replica ran, and its peak; how far
    gradients of the bound call are from Megatron's own, and its losses from those of the free
    one."""
    cases.join(case)
    chunks = cases.chunks_of(case)
    # Replicas have the same rows, with other weights in the loss.
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    batches = long_rows.batches_of(PROMPTS)
    for batch in batches:
        batch["weights"] = torch.randn(len(batch["weights"]), 1, generator=generator)
    function = get_forward_backward_func()
    shared = dormouse.megatron.share(function, runtime=runtime, **case.share)
    rows, columns = batches[0]["tokens"].shape
    # Megatron's interleaved schedule sends these shapes.
    shape = {"seq_length": columns, "micro_batch_size": rows}
    run = functools.partial(cases.run, case, ddp=chunks, batches=batches, **shape)
    ran: list[list[int]] = []
    found: dict = {"prompts": {}, "peaks": {}, "losses": {}}

    def recorded(shared_parts, last, context, own, work, named):
        ran.append([len(each.rows) for each in work.places])
        return run_pipelined(shared_parts, last, context, own, work, named)

    def called(name: str, **more) -> None:
        with read_peaks(runtime) as peaks:
            found["losses"][name] = run(shared, **more)
        found["prompts"][name], found["peaks"][name] = ran[-1], peaks

    with mock.patch("dormouse.megatron.forward_backward.run_pipelined", recorded):
        called("first")
        called(FREE)
        room = int(ROOM_SHARE * found["peaks"][FREE][0]["bytes"])
        with mock.patch.object(Held, "room_bytes", room if dist.get_rank() == 0 else 1 << 60):
            called(BOUND)
            gradients = cases.gradients(chunks)
            called(EVALUATED, forward_only=True)
    run(function)
    return found | {"distance": distance(cases.gradients(chunks), gradients)}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: figures_of(case, runtime) for name, case in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
