"""One rank of test_killed_ranks.py, over gloo. One is killed in a call, and the others go on.

``python killed_worker.py DIRECTORY NAME RANK``, with the environment of torchrun, kills that rank
in a call of a case of :data:`KILLED`. It leaves ``killed.pt`` there, when that was, and each other
rank ``RANK.pt``: its error, what is in use afterwards, and what came of a call that the others make
as replicas of the whole model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
from dormouse.hf.step import LivePrefix
from dormouse.megatron.refusals import unwrapped
from failing_worker import CHUNKS, EXPERTS, FOUR_STAGES, PARTS, REPLICAS, STAGES, joined, shared
from in_use import asleep_bytes, awake_bytes, most_asleep_bytes
from models import distance
from rooms import room_of

CONTEXT = dataclasses.replace(REPLICAS, context_parallel=2, share={"microbatch_tokens": 9})
KILLED = {
    "stages": STAGES,
    "chunks": CHUNKS,
    "four stages": FOUR_STAGES,
    "parts": PARTS,
    "replicas": REPLICAS,
    "experts": EXPERTS,
    "context": CONTEXT,
    "context, ring": dataclasses.replace(CONTEXT, ring=True),
}


class Calls:
    """Calls of one layout, in process groups of its own."""

    def __init__(self, case: cases.Case, runtime):
        self._case, self._runtime = case, runtime
        self._model, self._function = cases.chunks_of(case), shared(case, runtime)

    def distance(self) -> float:
        """Returns how far a call's gradients are from Megatron's own."""
        found = []
        for function in (get_forward_backward_func(), self._function):
            self._run(function)
            found.append(cases.gradients(self._model))
        return distance(*found)

    def asleep(self) -> int:
        """Returns the most bytes asleep in a call."""
        return most_asleep_bytes(self._runtime, lambda: self._run(self._function))

    def gradient_bytes(self) -> int:
        return sum(each.nbytes for each in cases.gradients(self._model).values())

    def _run(self, function) -> None:
        gpt = unwrapped(self._model[0])
        with room_of(gpt, self._case.prompt_tokens, is_ring=self._case.ring):
            cases.run(self._case, function, self._model, cases.batches_of())


def dying(path: Path) -> contextlib.AbstractContextManager:
    """Returns the context in which this process is killed as its first prompt runs backward."""

    def die(*args, **named):
        torch.save(time.monotonic(), path)
        os.kill(os.getpid(), signal.SIGKILL)

    return mock.patch.object(LivePrefix, "backward", die)


def told(case: cases.Case, runtime, died: Path | None) -> dict:
    """Returns the error of a call in which a rank dies, and when it came. ``died``: where this one
    leaves when it died; None: it does not."""
    calls = Calls(case, runtime)
    found = {"distance": calls.distance(), "asleep_before": calls.asleep()}
    found["gradient_bytes"] = calls.gradient_bytes()
    try:
        with contextlib.nullcontext() if died is None else dying(died):
            found["asleep_within"] = calls.asleep()
    except Exception as error:
        found |= {"error": f"{type(error).__name__}: {error}", "told_s": time.monotonic()}
    return found


def main(directory: Path, name: str, killed: int) -> None:
    torch.set_num_threads(1)
    case, rank = KILLED[name].wide, int(os.environ["RANK"])
    left = cases.Case(case.ranks - 1, share={"microbatch_tokens": 9}).wide
    with conftest.a_runtime() as runtime:
        with joined(directory / "before", case):
            told(case, runtime, None)
        awake_before = awake_bytes(runtime)
        with joined(directory / "killed", case):
            found = told(case, runtime, directory / "killed.pt" if rank == killed else None)
        found |= {
            "asleep": asleep_bytes(runtime),
            "stays": awake_bytes(runtime) - awake_before,
        }
        os.environ |= {"RANK": str(rank - (rank > killed)), "WORLD_SIZE": str(left.ranks)}
        with joined(directory / "left", left):
            calls = Calls(left, runtime)
            found |= {"next": calls.distance(), "next_asleep": calls.asleep()}
            dist.barrier()
    torch.save(found, directory / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
