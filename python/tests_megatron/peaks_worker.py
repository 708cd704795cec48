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
from stage_peaks import read_peaks

STAGES = cases.Case(2, stages=2, config=long_rows.CONFIG, share={"microbatch_tokens": 260})
AWAKE = dataclasses.replace(STAGES, share=STAGES.share | {"sleep": False})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=STAGES.config | cases.INTERLEAVED)
PROMPTS = (300, 200, 260)
CASES = {"two stages": STAGES, "two stages, awake": AWAKE, "two stages of two chunks": CHUNKS}
# Too few for any list: as little as possible is in flight then.
ROOM_BYTES = 1


def figures_of(case: cases.Case, runtime) -> dict:
    """Returns figures of the first call, peaks of it, of the second, of one in as little memory as
    the second's plan is accepted in, and of one without room, and how far the gradients of the
    last two are from Megatron's own."""
    cases.join(case)
    chunks, batches = cases.chunks_of(case), long_rows.batches_of(PROMPTS)
    function = get_forward_backward_func()
    shared = dormouse.megatron.share(function, runtime=runtime, **case.share)
    rows, columns = batches[0]["tokens"].shape
    # Megatron's interleaved schedule sends these shapes.
    shape = {"seq_length": columns, "micro_batch_size": rows}
    run = functools.partial(cases.run, case, ddp=chunks, batches=batches, **shape)
    with read_peaks(runtime) as free:
        run(shared)
        held = shared._models[unwrapped(chunks[0]), ALL_GATHER].held
        found = {"bytes": dataclasses.asdict(held.bytes)}
        run(shared)
    with read_peaks(runtime, within_plan=True) as within:
        run(shared)
    gradients = [cases.gradients(chunks)]
    # On one stage alone: all must plan the same.
    room = ROOM_BYTES if dist.get_rank() == 0 else 1 << 60
    with mock.patch.object(Held, "room_bytes", room), read_peaks(runtime) as without_room:
        run(shared)
    gradients.append(cases.gradients(chunks))
    run(function)
    found["distance"] = largest(distance(cases.gradients(chunks), each) for each in gradients)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    found["gradient_bytes"] = sum(p.nbytes for p in parameters)
    peaks = [*free, *within, *without_room]
    return found | {"peaks": peaks, "asleep": runtime.stats()["asleep"]["current_bytes"]}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: figures_of(case, runtime) for name, case in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
