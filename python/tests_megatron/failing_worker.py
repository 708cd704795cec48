"""One rank of test_failing_ranks.py, over gloo.

``python failing_worker.py DIRECTORY errors`` runs every case of :data:`FAILING`, each in process
groups of its own, and leaves ``errors.RANK`` there: what :func:`what_came_of` returns, and what is
asleep afterwards.
``python failing_worker.py DIRECTORY killed RANK`` kills that rank in a call, and leaves
``error.RANK`` of the other. With the environment of torchrun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer

import cases
import dormouse.megatron
from dormouse.hf.prefix import PlannedForward
from dormouse.megatron.stage import Stage
from dormouse.megatron.stage_step import StageStep
from models import distance

STAGES = cases.Case(2, stages=2, share={"microbatch_tokens": 9})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=cases.INTERLEAVED)
PARTS = cases.Case(2, 2, share={"microbatch_tokens": 9})
REPLICAS = cases.Case(2)
NO_RANK = -1


class WorkError(Exception):
    """Of a rank's work."""


@dataclass(frozen=True)
class Failing:
    """One rank fails in a call of the schedule."""

    case: cases.Case
    rank: int
    enter: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """Context of the call on that rank."""
    arguments: Callable[[], dict] = dict
    """Of the schedule on that rank."""


def raises(*args, **named):
    raise WorkError("of one rank")


def in_place_of(owner: type, name: str) -> Callable:
    """Returns a context in which a method raises."""
    return lambda: mock.patch.object(owner, name, raises)


def layer_within(name: str) -> Callable:
    """Returns a context in which layers raise within a method of a stage, after the model's
    check."""
    own = getattr(Stage, name)

    def failing(self, argument):
        with mock.patch.object(TransformerLayer, "forward", raises):
            return own(self, argument)

    return lambda: mock.patch.object(Stage, name, failing)


def a_loss() -> dict:
    def forward_step(data_iterator, model):
        next(data_iterator)
        raises()

    return {"forward_step_func": forward_step}


def no_data() -> dict:
    return {"data_iterator": None}


FAILING = {
    "stage 0, layer of the first forwards": Failing(STAGES, 0, layer_within("values")),
    "stage 0, layer of its list": Failing(STAGES, 0, layer_within("backward")),
    "stage 0, backward": Failing(STAGES, 0, in_place_of(StageStep, "prefix_backward")),
    "stage 0, refusal": Failing(STAGES, 0, arguments=no_data),
    "stage 1, layer of the first forwards": Failing(STAGES, 1, layer_within("values")),
    "stage 1, loss": Failing(STAGES, 1, arguments=a_loss),
    "stage 1, backward": Failing(STAGES, 1, in_place_of(StageStep, "microbatch_backward")),
    "stage 0 of two chunks, first forwards": Failing(CHUNKS, 0, layer_within("values")),
    "stage 1 of two chunks, backward": Failing(
        CHUNKS, 1, in_place_of(StageStep, "prefix_backward")
    ),
    "part 0, prefix": Failing(PARTS, 0, in_place_of(PlannedForward, "forward")),
    "part 1, loss": Failing(PARTS, 1, arguments=a_loss),
    "replica 1, loss": Failing(REPLICAS, 1, arguments=a_loss),
    "no stage": Failing(STAGES, NO_RANK),
    "no part": Failing(PARTS, NO_RANK),
}


def shared(case: cases.Case, runtime) -> Callable:
    return dormouse.megatron.share(get_forward_backward_func(), runtime=runtime, **case.share)


@contextlib.contextmanager
def joined(store: Path, case: cases.Case):
    """Context of process groups of its own."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world
    )
    cases.join(case)
    try:
        yield
    finally:
        dist.destroy_process_group()


def what_came_of(failing: Failing, runtime) -> dict:
    """Returns the error of a call, the rank that it names, and how far the gradients of the call
    before, which follows the failures of other cases, are from Megatron's own."""
    model, function = cases.chunks_of(failing.case), shared(failing.case, runtime)
    found = []
    for each in (get_forward_backward_func(), function):
        cases.run(failing.case, each, model, cases.batches_of())
        found.append(cases.gradients(model))
    own = {"error": None, "rank": None, "distance": distance(*found)}
    is_failing = dist.get_rank() == failing.rank
    arguments = failing.arguments() if is_failing else {}
    try:
        with failing.enter() if is_failing else contextlib.nullcontext():
            cases.run(failing.case, function, model, cases.batches_of(), **arguments)
    except Exception as error:
        failure = getattr(error, "failure", None)
        own |= {"error": f"{type(error).__name__}: {error}", "rank": failure and failure.rank}
    return own


def run_cases(directory: Path, runtime) -> dict:
    found = {}
    for name, failing in FAILING.items():
        with joined(directory / name, failing.case):
            found[name] = what_came_of(failing, runtime)
        found[name]["asleep"] = runtime.stats()["asleep"]["current_bytes"]
    return found


def be_killed(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def killed(directory: Path, rank: int, runtime) -> None:
    cases.join(STAGES)
    model, function = cases.model_of(STAGES), shared(STAGES, runtime)
    cases.run(STAGES, function, model, cases.batches_of())
    dying = mock.patch.object(StageStep, "microbatch_backward", be_killed)
    try:
        with dying if dist.get_rank() == rank else contextlib.nullcontext():
            cases.run(STAGES, function, model, cases.batches_of())
    except Exception as error:
        (directory / f"error.{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        # The process ends as it would, and does not wait for anybody.
        raise


def main(directory: Path, kind: str, *ranks: str) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        if kind == "killed":
            killed(directory, int(ranks[0]), runtime)
            return
        found = run_cases(directory, runtime)
        torch.save(found, directory / f"errors.{os.environ['RANK']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
