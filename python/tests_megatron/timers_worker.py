"""One rank of test_timers.py, over gloo.

``python timers_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
what each of :data:`CASES` returns. Ranks are not told of failures: a barrier that one of them never
enters is a wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config

import cases
from agreement_worker import CHUNKS, STAGES, Calls
from dormouse.megatron import forward_backward

LEVELS = (1, 2)
CASES = {
    f"{name}, level {level}": (case, level)
    for name, case in (
        ("two stages", STAGES),
        ("two stages of two chunks", CHUNKS),
        ("a configuration each", dataclasses.replace(CHUNKS, own_configs=True)),
        ("two replicas", dataclasses.replace(STAGES, stages=1)),
    )
    for level in LEVELS
}


def timed(case: cases.Case, level: int, runtime) -> dict:
    """Returns the seconds of Megatron's timer of a call, and how far the gradients of the call
    before are from Megatron's own."""
    calls = Calls(case, runtime)
    timers = Timers(level, "max")
    get_model_config(calls.chunks[0]).timers = timers
    found = calls.distance()
    timers("forward-backward").reset()
    calls.run(calls.shared)
    return {"distance": found, "seconds": timers("forward-backward").elapsed()}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    untold = mock.patch.object(forward_backward, "fail_together", contextlib.nullcontext)
    with conftest.a_runtime() as runtime, untold:
        found = {name: timed(*case, runtime) for name, case in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
