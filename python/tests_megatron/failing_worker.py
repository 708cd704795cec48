"""One rank of test_failing_ranks.py, over gloo.

``python failing_worker.py DIRECTORY [CASE...]``, with the environment of torchrun, runs every case
of :data:`FAILING` and :data:`DIFFERING` with as many ranks as there are, each in process groups of
its own, and leaves ``RANK.pt`` there: what :func:`what_came_of` returns, and what is in use
afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
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
from dormouse.megatron import SharedForwardBackward
from dormouse.megatron.stage import Stage
from dormouse.megatron.stage_step import StageStep
from dormouse.runtime import Runtime
from in_use import asleep_bytes, awake_bytes, most_asleep_bytes
from models import distance, largest

STAGES = cases.Case(2, stages=2, share={"microbatch_tokens": 9})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=cases.INTERLEAVED)
PARTS = cases.Case(2, 2, share={"microbatch_tokens": 9})
REPLICAS = cases.Case(2)
ACROSS = dataclasses.replace(REPLICAS, share=cases.ACROSS)
EXPERTS = dataclasses.replace(REPLICAS, expert_parallel=2, config=cases.EXPERTS)
BALANCED = dataclasses.replace(REPLICAS, config=cases.BALANCED)
STAGES_OF_PARTS = dataclasses.replace(PARTS, ranks=4, stages=2)
STAGES_OF_REPLICAS = dataclasses.replace(STAGES, ranks=4)
FOUR_STAGES = dataclasses.replace(STAGES, ranks=4, stages=4)
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
    arguments: Callable[[Callable], dict] = lambda shared: {}
    """Of the schedule on that rank, which the function gets."""
    others_late_s: float = 0.0
    """How much later the other ranks begin the call."""
    share: dict | None = None
    """Options of that rank's function; each rank then has a new one. None: those of all ranks."""


@dataclass(frozen=True)
class Differing(Failing):
    """One rank is about to run something else than the others. Nothing of it fails."""

    names: tuple[str, ...] = ()
    """Of what differs."""


@dataclass
class Raised:
    """The last failure that this rank was made to raise."""

    runtime: Runtime | None = None
    at_s: float = 0.0
    """By a clock that all processes of a machine have."""
    asleep_bytes: int = 0
    """What was asleep then."""

    def note(self) -> None:
        self.at_s = time.monotonic()
        self.asleep_bytes = asleep_bytes(self.runtime)


RAISED = Raised()


def raises(*args, error: type[Exception] = WorkError, **named):
    RAISED.note()
    raise error("of one rank")


def in_place_of(owner: type, name: str, error: type[Exception] = WorkError) -> Callable:
    """Returns a context in which a method raises."""

    def failing(*args, **named):
        raises(error=error)

    return lambda: mock.patch.object(owner, name, failing)


def layer_within(name: str) -> Callable:
    """Returns a context in which layers raise within a method of a stage, after the model's
    check."""
    own = getattr(Stage, name)

    def failing(self, argument):
        with mock.patch.object(TransformerLayer, "forward", raises):
            return own(self, argument)

    return lambda: mock.patch.object(Stage, name, failing)


def a_loss(shared: Callable) -> dict:
    def forward_step(data_iterator, model):
        next(data_iterator)
        raises()

    return {"forward_step_func": forward_step}


def a_loss_of_rows(shared: Callable) -> dict:
    """Raises once the model has run, whose prompts sleep until its backward."""

    def forward_step(data_iterator, model):
        return cases.forward_step(REPLICAS, data_iterator, model)[0], raises

    return {"forward_step_func": forward_step}


def evaluation(shared: Callable) -> dict:
    """The schedule is called in a loss, where the other stage is not in it."""

    def forward_step(data_iterator, model):
        RAISED.note()
        shared(data_iterator=data_iterator, model=model, num_microbatches=1, forward_only=True)

    return {"forward_step_func": forward_step}


def model_evaluated(shared: Callable) -> dict:
    """The model is called without gradients in a loss, where the other stage is not in it."""

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        RAISED.note()
        with torch.no_grad():
            model(batch["tokens"], batch["positions"], None, labels=batch["labels"])

    return {"forward_step_func": forward_step}


def no_data(shared: Callable) -> dict:
    RAISED.note()
    return {"data_iterator": None}


def few_data(shared: Callable) -> dict:
    def batches():
        yield from cases.batches_of()[:-1]
        RAISED.note()

    return {"data_iterator": batches()}


def other_batches(change: Callable[[dict], dict], chunks: int = 1, **named) -> Callable:
    """Returns arguments with changed batches. ``named``: of :func:`cases.batches_of`."""

    def arguments(shared: Callable) -> dict:
        changed = list(map(change, cases.batches_of(**named)))
        RAISED.note()
        return {"data_iterator": [iter(changed) for _ in range(chunks)]}

    return arguments


def as_it_is(batch: dict) -> dict:
    return batch


def of_another_token(batch: dict) -> dict:
    """The first token of every prompt is another; lengths are the same."""
    tokens = batch["tokens"].clone()
    tokens[:, 0] = (tokens[:, 0] + 1) % cases.VOCABULARY
    return batch | {"tokens": tokens}


def unshared(batch: dict) -> dict:
    """Every label carries loss, so there is no prompt."""
    return batch | {"loss_mask": torch.ones_like(batch["loss_mask"])}


def of_other_masks(batch: dict) -> dict:
    """The mask has a column less than the tokens."""
    return batch | {"loss_mask": batch["loss_mask"][:, :-1]}


def fewer_microbatches(shared: Callable) -> dict:
    return {"num_microbatches": 2}


def forward_only(shared: Callable) -> dict:
    return {"forward_only": True}


def other_options():
    def options(self, *args):
        return {"microbatch_tokens": 7}

    return mock.patch.object(SharedForwardBackward, "_options", options)


def other_graphs():
    def options(self, *args):
        return {"microbatch_tokens": 9, "graphs": "twice"}

    return mock.patch.object(SharedForwardBackward, "_options", options)


FAILING = {
    # Before all others of their kind: the first call of one allocates what stays for all.
    "no stage": Failing(STAGES, NO_RANK),
    "no part": Failing(PARTS, NO_RANK),
    "no replica, experts on both": Failing(EXPERTS, NO_RANK),
    "no stage of four": Failing(FOUR_STAGES, NO_RANK),
    "stage 0, layer of the first forwards": Failing(STAGES, 0, layer_within("values")),
    "stage 0, layer of its list": Failing(STAGES, 0, layer_within("backward")),
    "stage 0, backward": Failing(STAGES, 0, in_place_of(StageStep, "prefix_backward")),
    "stage 0, refusal": Failing(STAGES, 0, arguments=no_data),
    "stage 1, layer of the first forwards": Failing(STAGES, 1, layer_within("values")),
    "stage 1, loss": Failing(STAGES, 1, arguments=a_loss),
    "stage 1, evaluation in a loss": Failing(STAGES, 1, arguments=evaluation),
    "stage 1, the model is evaluated in a loss": Failing(STAGES, 1, arguments=model_evaluated),
    "stage 1 of two chunks, the model is evaluated in a loss": Failing(
        CHUNKS, 1, arguments=model_evaluated
    ),
    "stage 1, backward": Failing(STAGES, 1, in_place_of(StageStep, "microbatch_backward")),
    "stage 0 of two chunks, first forwards": Failing(CHUNKS, 0, layer_within("values")),
    "stage 1 of two chunks, backward": Failing(
        CHUNKS, 1, in_place_of(StageStep, "prefix_backward")
    ),
    "part 0, prefix": Failing(PARTS, 0, in_place_of(PlannedForward, "forward")),
    "part 1, loss": Failing(PARTS, 1, arguments=a_loss),
    "part 1, loss of rows": Failing(PARTS, 1, arguments=a_loss_of_rows),
    "replica 1, loss": Failing(REPLICAS, 1, arguments=a_loss),
    "replica 1, loss of rows": Failing(REPLICAS, 1, arguments=a_loss_of_rows),
    "replica 1, loss, experts on both": Failing(EXPERTS, 1, arguments=a_loss),
    "replica 0, prefix, experts on both": Failing(
        EXPERTS, 0, in_place_of(PlannedForward, "forward")
    ),
    "replica 1, loss, prompts of both": Failing(ACROSS, 1, arguments=a_loss),
    "replica 1, loss of rows, prompts of both": Failing(ACROSS, 1, arguments=a_loss_of_rows),
    "replica 0, prefix, prompts of both": Failing(
        ACROSS, 0, in_place_of(PlannedForward, "forward")
    ),
    "replica 1, other masks, prompts of both": Failing(
        ACROSS, 1, arguments=other_batches(of_other_masks)
    ),
    "stage 0, before stage 1 arrives": Failing(STAGES, 0, arguments=no_data, others_late_s=3.0),
    "stage 0 of four, its list": Failing(FOUR_STAGES, 0, layer_within("backward")),
    "stage 2 of four, first forwards": Failing(FOUR_STAGES, 2, layer_within("values")),
    "stage 3 of four, loss": Failing(FOUR_STAGES, 3, arguments=a_loss),
    # Replicas of a stage follow each other.
    "stage 0 of replica 1": Failing(
        STAGES_OF_REPLICAS, 1, in_place_of(StageStep, "prefix_backward")
    ),
    "stage 1 of replica 0, loss": Failing(STAGES_OF_REPLICAS, 2, arguments=a_loss),
}
PROMPTS = ("prompts",)
DIFFERING = {
    "stage 0, another token": Differing(
        STAGES, 0, arguments=other_batches(of_another_token), names=PROMPTS
    ),
    "stage 1, longer prompts": Differing(
        STAGES, 1, arguments=other_batches(as_it_is, prompt_tokens=22), names=PROMPTS
    ),
    "stage 1, no shared prompt": Differing(
        STAGES, 1, arguments=other_batches(unshared), names=PROMPTS
    ),
    "stage 1, fewer microbatches": Differing(
        STAGES, 1, arguments=fewer_microbatches, names=("microbatches", "prompts")
    ),
    "stage 0, forward only": Differing(STAGES, 0, arguments=forward_only, names=("direction",)),
    "stage 1, other options": Differing(STAGES, 1, other_options, names=("options",)),
    "stage 1 of two chunks, another token": Differing(
        CHUNKS, 1, arguments=other_batches(of_another_token, chunks=2), names=PROMPTS
    ),
    "part 0, another token": Differing(
        PARTS, 0, arguments=other_batches(of_another_token), names=PROMPTS
    ),
    "part 1, other options": Differing(PARTS, 1, other_options, names=("options",)),
    "replica 0, forward only": Differing(
        REPLICAS, 0, arguments=forward_only, names=("direction",)
    ),
    "replica 1, forward only": Differing(
        REPLICAS, 1, arguments=forward_only, names=("direction",)
    ),
    "replica 1, forward only, experts on both": Differing(
        EXPERTS, 1, arguments=forward_only, names=("direction",)
    ),
    "replica 1, fewer microbatches, balanced over both": Differing(
        BALANCED, 1, arguments=fewer_microbatches, names=("microbatches with global_aux_loss",)
    ),
    "replica 0, other graphs, experts on both": Differing(
        EXPERTS, 0, other_graphs, names=("options",)
    ),
    "replica 1, forward only, prompts of both": Differing(
        ACROSS, 1, arguments=forward_only, names=("direction",)
    ),
    "replica 0, other options, prompts of both": Differing(
        ACROSS, 0, other_options, names=("options",)
    ),
    "stage 1, batches end": Differing(STAGES, 1, arguments=few_data, names=("data",)),
    "replica 0, batches end": Differing(REPLICAS, 0, arguments=few_data, names=("data",)),
    "replica 1, prompts of both there alone": Differing(
        REPLICAS, 1, share=cases.ACROSS, names=("across_replicas",)
    ),
    "replica 0, prompts of both on the other": Differing(
        ACROSS, 0, share={}, names=("across_replicas",)
    ),
    "part 1 of stage 1 of two": Differing(
        STAGES_OF_PARTS, 3, arguments=other_batches(of_another_token), names=PROMPTS
    ),
    "stage 1 of replica 0 of two": Differing(
        STAGES_OF_REPLICAS, 2, arguments=other_batches(of_another_token), names=PROMPTS
    ),
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
    """Returns the error of a call, the rank that it names, when it came and when it was raised, and
    what slept. Of the calls before, which follow the failures of other cases: what slept in the
    last, and how far their gradients are from Megatron's own."""
    RAISED.at_s, RAISED.asleep_bytes = 0.0, 0
    model, function = cases.chunks_of(failing.case), shared(failing.case, runtime)

    def gradients_of(each: Callable) -> cases.Tensors:
        cases.run(failing.case, each, model, cases.batches_of())
        return cases.gradients(model)

    exact, found = gradients_of(get_forward_backward_func()), []

    def call() -> None:
        found.append(gradients_of(function))

    # The first call checks the model, too.
    call()
    asleep_before = most_asleep_bytes(runtime, call)
    own = {
        "error": None,
        "rank": None,
        "distance": largest(distance(exact, each) for each in found),
        "asleep_before": asleep_before,
        "gradient_bytes": sum(each.nbytes for each in exact.values()),
    }
    is_failing = dist.get_rank() == failing.rank
    if failing.share is not None:
        options = failing.share if is_failing else failing.case.share
        function = shared(dataclasses.replace(failing.case, share=options), runtime)
    arguments = failing.arguments(function) if is_failing else {}
    if not is_failing:
        time.sleep(failing.others_late_s)

    def fail() -> None:
        try:
            with failing.enter() if is_failing else contextlib.nullcontext():
                cases.run(failing.case, function, model, cases.batches_of(), **arguments)
        except Exception as error:
            failure = getattr(error, "failure", None)
            own.update(
                error=f"{type(error).__name__}: {error}",
                rank=failure and failure.rank,
                told_s=time.monotonic(),
            )

    own["asleep_within"] = most_asleep_bytes(runtime, fail)
    own |= {"raised_s": RAISED.at_s, "asleep_at_error": RAISED.asleep_bytes}
    return own


def run_cases(directory: Path, names: list[str], runtime) -> dict:
    found, before = {}, awake_bytes(runtime)
    for name, failing in (FAILING | DIFFERING).items():
        if names and name not in names:
            continue
        if failing.case.ranks != int(os.environ["WORLD_SIZE"]):
            continue
        failing = dataclasses.replace(failing, case=failing.case.wide)
        with joined(directory / name, failing.case):
            found[name] = what_came_of(failing, runtime)
        after = awake_bytes(runtime)
        found[name] |= {"asleep": asleep_bytes(runtime), "stays": after - before}
        before = after
    return found


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        RAISED.runtime = runtime
        found = run_cases(directory, names, runtime)
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
