"""One rank of test_faults.py, over gloo.

``python faults_worker.py DIRECTORY [CASE...]``, with the environment of torchrun, leaves
``RANK.pt`` there: what each of :data:`CASES` with as many ranks returns. No rank fails in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer

import cases
from agreement_worker import PARTS, STAGES, Calls
from dormouse.hf.step import Step
from dormouse.megatron.stage import Stage
from dormouse.megatron.stage_step import StageStep
from in_use import left_by
from models import distance, largest

REPLICAS = cases.Case(
    2, config={"calculate_per_token_loss": True}, per_token=True, share={"microbatch_tokens": 9}
)
# Longer than any wait for an answer, and than a connection to a machine that vanished.
LATE_S = 8.0


@dataclass(frozen=True)
class Late:
    """One rank is late, before a call or in it."""

    case: cases.Case
    rank: int
    within: Callable[[], contextlib.AbstractContextManager] | None = None
    """Context of the call on that rank; None: the call begins late."""

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        found = {"distance": calls.distance()}
        exact = cases.gradients(calls.chunks)
        late = contextlib.nullcontext
        start_s = time.monotonic()
        if dist.get_rank() == self.rank:
            late = self.within or late
            if self.within is None:
                time.sleep(LATE_S)
        with late():
            error = calls.error()
        found |= {"error": error, "seconds": time.monotonic() - start_s}
        found["late"] = distance(exact, cases.gradients(calls.chunks))
        return found


def once(owner: type, name: str, wait: Callable[[], None]) -> Callable:
    """Returns a context in which the first call of a method waits."""
    own = getattr(owner, name)

    def context():
        waits = [wait]

        def waiting(self, *args, **named):
            if waits:
                waits.pop()()
            return own(self, *args, **named)

        return mock.patch.object(owner, name, waiting)

    return context


def sleep() -> None:
    time.sleep(LATE_S)


def stop() -> None:
    """Stops this process, its threads included."""
    command = f"sleep {LATE_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], env={}, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def without_loss(batch: dict) -> dict:
    return batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])}


def lone(batch: dict) -> dict:
    """One microbatch of one replica has a loss."""
    is_it = cases.parallel_state.get_data_parallel_rank() == 0 and batch["number"] == 1
    return batch if is_it else without_loss(batch)


def weightless(batch: dict) -> dict:
    """Losses have gradients of 0."""
    return batch | {"weights": torch.zeros_like(batch["weights"])}


def unshared(batch: dict) -> dict:
    """Responses of both rows begin with a label of their own, so each has a prompt of its own."""
    tokens = batch["tokens"].clone()
    tokens[:, 0] = torch.arange(len(tokens)) + batch["number"] * len(tokens)
    return batch | {"tokens": tokens}


@dataclass(frozen=True)
class Share:
    """Batches of one replica, or of all, are changed."""

    case: cases.Case
    change: Callable[[dict], dict]
    replicas: tuple[int, ...]
    """Whose batches are changed."""
    numbers: tuple[int, ...] = (0, 1, 2)
    """Of the microbatches that are changed."""

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)

        def iterators() -> list:
            batches = cases.batches_of(is_across=self.case.is_across)
            found = [each | {"number": i} for i, each in enumerate(batches)]
            if cases.parallel_state.get_data_parallel_rank() in self.replicas:
                found = [
                    self.change(each) if each["number"] in self.numbers else each for each in found
                ]
            return [iter(found) for _ in calls.chunks]

        found = {"distance": calls.distance(data_iterator=iterators)}
        found["prompts"] = calls.shared.sharing.prompts
        found["next"] = calls.distance()
        return found


@dataclass(frozen=True)
class Ended:
    """The data ends on all ranks, within the microbatches of a call."""

    case: cases.Case

    def __call__(self, runtime) -> dict:
        calls, error = Calls(self.case, runtime), None
        batches = [iter(cases.batches_of()[:-1]) for _ in calls.chunks]
        try:
            calls.run(calls.shared, num_microbatches=3, data_iterator=batches)
        except StopIteration as end:
            error = end
        # Of the iterator itself, in process groups that are open.
        return {"error": type(error).__name__, "next": calls.distance()}


@dataclass(frozen=True)
class NoLoss:
    """No row carries loss, on no rank."""

    case: cases.Case

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        batches = list(map(without_loss, cases.batches_of()))
        cases.run(self.case, calls.shared, calls.chunks, batches)
        found = cases.gradients(calls.chunks)
        return {
            "largest": largest(float(each.abs().max()) for each in found.values()),
            "next": calls.distance(),
        }


@dataclass(frozen=True)
class Frozen:
    """No parameter of one stage is trained."""

    case: cases.Case
    stage: int

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        is_frozen = cases.parallel_state.get_pipeline_model_parallel_rank() == self.stage
        for chunk in calls.chunks:
            chunk.requires_grad_(not is_frozen)
        calls.run(get_forward_backward_func())
        theirs = cases.gradients(calls.chunks)
        calls.run(calls.shared)
        ours = cases.gradients(calls.chunks)
        for chunk in calls.chunks:
            chunk.requires_grad_(True)
        return {
            "is_frozen": is_frozen,
            "largest": largest(float(each.abs().max()) for each in theirs.values()),
            "difference": largest(
                float((ours[n] - each).abs().max()) for n, each in theirs.items()
            ),
            "next": calls.distance(),
        }


@dataclass(frozen=True)
class Evaluated:
    """The model, and another, are evaluated in the loss of each microbatch."""

    case: cases.Case
    by: str
    """What evaluates the model: :data:`EVALUATIONS`."""

    def __call__(self, runtime) -> dict:
        calls = Calls(self.case, runtime)
        other = cases.chunks_of(self.case)[0]
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        evaluated: list[torch.Tensor] = []
        # The last call's, of both ways.
        ways = {}

        def step(data_iterator, model):
            losses, own = cases.forward_step(self.case, data_iterator, model)

            def loss_func(given):
                with torch.no_grad():
                    evaluated.append(EVALUATIONS[self.by](self.case, calls, model))
                    evaluated.append(model_evaluated(self.case, calls, other))
                return own(given)

            return losses, loss_func

        found = []
        for way, function in (("plain", get_forward_backward_func()), ("shared", calls.shared)):
            evaluated.clear()
            calls.run(function, forward_step_func=step)
            found.append(cases.gradients(calls.chunks))
            ways[way] = torch.stack(evaluated)
        return {"distance": distance(*found), "evaluated": ways, "next": calls.distance()}


def model_evaluated(case: cases.Case, calls: Calls, model) -> torch.Tensor:
    batch = cases.batches_of(call=1)[0]
    model.eval()
    losses, own = cases.forward_step(case, iter([batch]), model)
    model.train()
    return own(losses)[0]


def schedule_evaluated(case: cases.Case, calls: Calls, model) -> torch.Tensor:
    """By the schedule of the call itself."""
    batches = cases.batches_of(call=1)
    step = partial(cases.forward_step, case)
    own = {"seq_length": cases.COLUMNS_MAX, "micro_batch_size": 2, "forward_step_func": step}
    logged = calls.shared(
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        forward_only=True,
        **own,
    )
    return torch.stack([each["loss"] for each in logged]).sum()


EVALUATIONS = {"model": model_evaluated, "schedule": schedule_evaluated}
STAGES_OF_REPLICAS = dataclasses.replace(REPLICAS, ranks=4, stages=2)
EXPERTS = dataclasses.replace(
    REPLICAS, expert_parallel=2, config=REPLICAS.config | cases.EXPERTS
)
BALANCED = dataclasses.replace(REPLICAS, config=REPLICAS.config | cases.BALANCED)
BALANCED_EXPERTS = dataclasses.replace(BALANCED, expert_parallel=2)
OVERLAPPED = dataclasses.replace(REPLICAS, ddp={"overlap_grad_reduce": True, "bucket_size": 1000})
SHARDED = dataclasses.replace(REPLICAS, ddp={"use_distributed_optimizer": True})
PER_TOKEN_STAGES = dataclasses.replace(REPLICAS, stages=2)
CHUNKS_OF_REPLICAS = dataclasses.replace(
    STAGES_OF_REPLICAS, chunks=2, config=REPLICAS.config | cases.INTERLEAVED
)
EXPERTS_OF_STAGES = dataclasses.replace(EXPERTS, ranks=4, stages=2)
EXPERTS_OF_CHUNKS = dataclasses.replace(
    EXPERTS_OF_STAGES, chunks=2, config=EXPERTS.config | cases.INTERLEAVED
)
OVERLAPPED_STAGES = dataclasses.replace(STAGES_OF_REPLICAS, ddp=OVERLAPPED.ddp)
ACROSS = dataclasses.replace(REPLICAS, share=cases.ACROSS)
ACROSS_FOUR = dataclasses.replace(ACROSS, ranks=4, ddp=OVERLAPPED.ddp)
TWICE = dataclasses.replace(OVERLAPPED, share={"microbatch_tokens": 9, "graphs": "twice"})
ACROSS_TWICE = dataclasses.replace(ACROSS_FOUR, share=cases.ACROSS | {"graphs": "twice"})
ACROSS_STAGES = dataclasses.replace(OVERLAPPED_STAGES, share=cases.ACROSS)
# Without a number of tokens in a microbatch.
ACROSS_CONTEXT = dataclasses.replace(
    ACROSS, ranks=4, context_parallel=2, share={"across_replicas": True}
)
UNEVEN = dataclasses.replace(
    STAGES,
    config=STAGES.config
    | {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
)
LATE = {
    "stage 0, before the call": Late(STAGES, 0),
    "stage 1, before the call": Late(STAGES, 1),
    "stage 0, first forwards": Late(STAGES, 0, once(Stage, "values", sleep)),
    "stage 1, its list": Late(STAGES, 1, once(StageStep, "microbatch_backward", sleep)),
    "stage 0, stopped in its list": Late(STAGES, 0, once(StageStep, "microbatch_backward", stop)),
    "part 1, stopped in a layer": Late(PARTS, 1, once(TransformerLayer, "forward", stop)),
    "replica 1, before the call": Late(REPLICAS, 1),
    "replica 0, its backward, prompts of both": Late(
        dataclasses.replace(ACROSS, share=cases.ACROSS | {"graphs": "twice"}),
        0,
        once(Step, "run", sleep),
    ),
    "replica 1, its backward, experts on both": Late(EXPERTS, 1, once(Step, "run", sleep)),
}
SHARES = {
    "replica 1 has no loss": Share(REPLICAS, without_loss, (1,)),
    "replica 0 shares no prompt": Share(REPLICAS, unshared, (0,)),
    "replica 1 has no loss, overlapped": Share(OVERLAPPED, without_loss, (1,)),
    "replica 0 has no loss, sharded optimizer": Share(SHARDED, without_loss, (0,)),
    "a microbatch without loss, two stages": Share(PER_TOKEN_STAGES, without_loss, (0,), (1,)),
    "the last microbatch without loss, two stages": Share(
        PER_TOKEN_STAGES, without_loss, (0,), (2,)
    ),
    "the last microbatch without loss, two replicas": Share(REPLICAS, without_loss, (1,), (2,)),
    "replica 1 of two stages has no loss": Share(STAGES_OF_REPLICAS, without_loss, (1,)),
    "replica 0 of two stages shares no prompt": Share(STAGES_OF_REPLICAS, unshared, (0,)),
    "replica 1 of two stages of two chunks has no loss": Share(
        CHUNKS_OF_REPLICAS, without_loss, (1,)
    ),
    "replica 1 of two stages has no loss, overlapped": Share(OVERLAPPED_STAGES, without_loss, (1,)),
    "replica 1 has no loss, experts on both": Share(EXPERTS, without_loss, (1,)),
    "replica 0 shares no prompt, experts on both": Share(EXPERTS, unshared, (0,)),
    "replica 1 has more prompts, experts on both": Share(EXPERTS, unshared, (1,), (0,)),
    "replica 0 has fewer responses, experts on both": Share(EXPERTS, without_loss, (0,), (1,)),
    "replica 0 shares no prompt, balanced over both": Share(BALANCED, unshared, (0,)),
    "replica 1 has no loss, balanced, experts on both": Share(
        BALANCED_EXPERTS, without_loss, (1,)
    ),
    "replica 1 of two stages has no loss, experts on both": Share(
        EXPERTS_OF_STAGES, without_loss, (1,)
    ),
    "replica 1 of two stages has more prompts, experts on both": Share(
        EXPERTS_OF_STAGES, unshared, (1,), (0,)
    ),
    "replica 0 of two stages has fewer responses, experts on both": Share(
        EXPERTS_OF_STAGES, without_loss, (0,), (1,)
    ),
    "replica 0 of two stages of two chunks has more prompts, experts on both": Share(
        EXPERTS_OF_CHUNKS, unshared, (0,), (2,)
    ),
    "replica 1 has no loss, prompts of both": Share(ACROSS, without_loss, (1,)),
    "replica 0 shares no prompt, prompts of both": Share(ACROSS, unshared, (0,)),
    "four replicas have two rows": Share(ACROSS_FOUR, lone, (0, 1, 2, 3)),
    "replica 1 has gradients of 0, overlapped": Share(TWICE, weightless, (1,)),
    "four replicas have two rows, overlapped": Share(ACROSS_TWICE, lone, (0, 1, 2, 3)),
    "two replicas of two stages have two rows, overlapped": Share(ACROSS_STAGES, lone, (0, 1)),
    "stages of three layers and of one": Share(UNEVEN, without_loss, ()),
}
KEPT = dataclasses.replace(PARTS, share={"graphs": "kept"})
EVALUATED = {
    "model, two parts": Evaluated(PARTS, "model"),
    "model, two parts, kept graphs": Evaluated(KEPT, "model"),
    "schedule, two parts": Evaluated(PARTS, "schedule"),
    "schedule, two replicas": Evaluated(cases.Case(2), "schedule"),
    "model, prompts of two replicas": Evaluated(ACROSS, "model"),
    "schedule, prompts of two replicas": Evaluated(
        cases.Case(2, share=cases.ACROSS), "schedule"
    ),
    "model, experts on both": Evaluated(EXPERTS, "model"),
    "model, balanced, experts on both": Evaluated(BALANCED_EXPERTS, "model"),
    "schedule, experts on both": Evaluated(
        cases.Case(2, expert_parallel=2, config=cases.EXPERTS), "schedule"
    ),
}
NO_LOSS = {
    "no loss, two stages": NoLoss(PER_TOKEN_STAGES),
    "no loss, two replicas": NoLoss(REPLICAS),
    "no loss, experts on both": NoLoss(EXPERTS),
    "no loss, two stages, experts on both": NoLoss(EXPERTS_OF_STAGES),
    "no loss, prompts of two replicas": NoLoss(ACROSS),
    "no loss, prompts of two replicas, context": NoLoss(ACROSS_CONTEXT),
}
FROZEN = {
    "the first stage is frozen": Frozen(STAGES, 0),
    "the last stage is frozen": Frozen(STAGES, 1),
}
ENDED = {
    "data end on two stages": Ended(STAGES),
    "data end on two replicas": Ended(REPLICAS),
    "data end on two stages of two replicas": Ended(STAGES_OF_REPLICAS),
}
CASES = LATE | SHARES | NO_LOSS | FROZEN | EVALUATED | ENDED


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, case in CASES.items():
            if names and name not in names:
                continue
            if case.case.ranks == int(os.environ["WORLD_SIZE"]):
                case = dataclasses.replace(case, case=case.case.wide)
                found[name] = left_by(runtime, partial(case, runtime))
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
