"""One rank of test_peaks.py, over gloo.

``python peaks_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
what each of :data:`CASES` returns.
"""

from __future__ import annotations

import dataclasses
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
from dormouse.megatron import stage
from dormouse.megatron.held import Held
from dormouse.megatron.refusals import unwrapped
from models import distance

STAGES = cases.Case(2, stages=2, config=long_rows.CONFIG, share={"microbatch_tokens": 260})
AWAKE = dataclasses.replace(STAGES, share=STAGES.share | {"sleep": False})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=STAGES.config | cases.INTERLEAVED)
PROMPTS = (300, 200, 260)
CASES = {"two stages": STAGES, "two stages, awake": AWAKE, "two stages of two chunks": CHUNKS}
# Too few for any list: as little as possible is in flight then.
ROOM_BYTES = 1


def figures_of(case: cases.Case, runtime) -> dict:
    """Returns figures of the first call, peaks of the second, and of one without room, and how far
    its gradients are from Megatron's own."""
    cases.join(case)
    chunks, batches = cases.chunks_of(case), long_rows.batches_of(PROMPTS)
    function = get_forward_backward_func()
    shared = dormouse.megatron.share(function, runtime=runtime, **case.share)
    rows, columns = batches[0]["tokens"].shape
    # Megatron's interleaved schedule sends these shapes.
    shape = {"seq_length": columns, "micro_batch_size": rows}
    peaks = []
    own = stage.carry_out

    def carry_out(of_stage: dict, *arguments) -> None:
        runtime.reset_peaks()
        before = runtime.stats()["allocated"]["current_bytes"]
        own(of_stage, *arguments)
        measured = runtime.stats()["allocated"]["peak_bytes"] - before
        peaks.append(of_stage["peak"] | {"measured": measured})

    with mock.patch.object(stage, "carry_out", carry_out):
        cases.run(case, shared, chunks, batches, **shape)
        held = shared._models[unwrapped(chunks[0])].held
        found = {"bytes": dataclasses.asdict(held.bytes)}
        cases.run(case, shared, chunks, batches, **shape)
        # On one stage alone: all must plan the same.
        room = ROOM_BYTES if dist.get_rank() == 0 else 1 << 60
        with mock.patch.object(Held, "room_bytes", room):
            cases.run(case, shared, chunks, batches, **shape)
    ours = cases.gradients(chunks)
    cases.run(case, function, chunks, batches, **shape)
    found["distance"] = distance(cases.gradients(chunks), ours)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    found["gradient_bytes"] = sum(p.nbytes for p in parameters)
    return found | {"peaks": peaks, "asleep": runtime.stats()["asleep"]["current_bytes"]}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: figures_of(case, runtime) for name, case in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
