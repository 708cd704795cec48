"""One rank of test_peaks.py, over gloo.

``python peaks_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
what each of :data:`CASES` returns.
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
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import dormouse.megatron
import long_rows
from dormouse.megatron.context_shards import ALL_GATHER
from dormouse.megatron.held import Held
from dormouse.megatron.refusals import unwrapped
from models import distance, largest
from stage_peaks import DEVICE, read_peaks

STAGES = cases.Case(2, stages=2, config=long_rows.CONFIG, share={"microbatch_tokens": 260})
AWAKE = dataclasses.replace(STAGES, share=STAGES.share | {"sleep": False})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=STAGES.config | cases.INTERLEAVED)
PROMPTS = (300, 200, 260)
CASES = {"two stages": STAGES, "two stages, awake": AWAKE, "two stages of two chunks": CHUNKS}
# Too few for any list: as little as possible is in flight then.
ROOM_BYTES = 1
BOUNDED_RANK = 0
# Of the way from the least peak of a stage to that in the whole budget. Half of it is about one
# microbatch more in flight, which would have room or not by a few bytes.
ROOM_SHARE = 2 / 3


def figures_of(case: cases.Case, runtime) -> dict:
    """Returns figures of the first call, peaks of it, of the second, of one in as little memory as
    the second's plan is accepted in, of one without room, and of one with a ``room`` between; and
    how far gradients are from Megatron's own."""
    cases.join(case)
    chunks, batches = cases.chunks_of(case), long_rows.batches_of(PROMPTS)
    function = get_forward_backward_func()
    shared = dormouse.megatron.share(function, runtime=runtime, **case.share)
    rows, columns = batches[0]["tokens"].shape
    # Megatron's interleaved schedule sends these shapes.
    shape = {"seq_length": columns, "micro_batch_size": rows}
    run = functools.partial(cases.run, case, ddp=chunks, batches=batches, **shape)
    run(function)
    # No other gradients are kept: what a stage holds before a list is the same in each call.
    expected, distances = cases.gradients(chunks), []

    def run_shared() -> None:
        run(shared)
        distances.append(distance(cases.gradients(chunks), expected))

    with read_peaks(runtime) as free:
        run_shared()
        held = shared._models[unwrapped(chunks[0]), ALL_GATHER].held
        found = {"bytes": dataclasses.asdict(held.bytes)}
        run_shared()
    with read_peaks(runtime, within_plan=True) as within:
        run_shared()
    # On one stage alone: all must plan the same.
    is_bounded = dist.get_rank() == BOUNDED_RANK
    room = ROOM_BYTES if is_bounded else 1 << 60
    with mock.patch.object(Held, "room_bytes", room), read_peaks(runtime) as without_room:
        run_shared()
    (least,) = without_room
    found["room"] = round(least["bytes"] + ROOM_SHARE * (free[-1]["bytes"] - least["bytes"]))
    budget_bytes = runtime.info()["alloc_budget_bytes"]
    if is_bounded:
        runtime.set_budget(DEVICE, least["held"] + found["room"])
    with read_peaks(runtime) as between:
        run_shared()
    runtime.set_budget(DEVICE, budget_bytes)
    found["distance"] = largest(distances)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    found["gradient_bytes"] = sum(p.nbytes for p in parameters)
    peaks = [*free, *within, *without_room, *between]
    return found | {"peaks": peaks, "asleep": runtime.stats()["asleep"]["current_bytes"]}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: figures_of(case, runtime) for name, case in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
