"""One rank of test_agreement.py, over gloo.

``python agreement_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: what each of :data:`CASES` returns, or of :data:`CASES_OF_FOUR`. Ranks are not told of failures: they agree, or they wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer

import cases
import dormouse.megatron
from dormouse.megatron import SharedForwardBackward, forward_backward
from dormouse.megatron.refusals import unwrapped
from dormouse.megatron.shared_gpt import SharedGPT
from models import distance
from rooms import budget_of, plan_of_readers

STAGES = cases.Case(2, stages=2, share={"microbatch_tokens": 9})
CHUNKS = dataclasses.replace(STAGES, chunks=2, config=cases.INTERLEAVED)
PARTS = cases.Case(2, 2, share={"microbatch_tokens": 9})
EXPERTS = cases.Case(
    2, expert_parallel=2, config=cases.EXPERTS, share={"microbatch_tokens": 9}
)
EXPERTS_OF_STAGES = dataclasses.replace(EXPERTS, ranks=4, stages=2)
UNEVEN = dataclasses.replace(
    STAGES,
    ranks=4,
    context_parallel=2,
    config={"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
)
COLUMNS = cases.Case(2, context_parallel=2, share={"microbatch_tokens": 9})
# The rank that alone deviates.
DEVIATING = 1


class Calls:
    """Calls of one layout of the model."""

    def __init__(self, case: cases.Case, runtime, **options):
        """``options``: of this rank alone."""
        cases.join(case)
        self.case, self.runtime = case, runtime
        self.chunks = cases.chunks_of(case)
        self.shared: SharedForwardBackward = dormouse.megatron.share(
            get_forward_backward_func(), runtime=runtime, **case.share, **options
        )

    def run(self, function: Callable, **named) -> list:
        return cases.run(self.case, function, self.chunks, cases.batches_of(), **named)

    def distance(self, **named) -> float:
        """Returns how far a call's gradients are from Megatron's own. ``named``: functions that
        return arguments of the schedule."""
        found = []
        for function in (get_forward_backward_func(), self.shared):
            self.run(function, **{name: make() for name, make in named.items()})
            found.append(cases.gradients(self.chunks))
        return distance(*found)

    def error(self) -> str | None:
        """Returns the error of a call."""
        try:
            self.run(self.shared)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def refusal(case: cases.Case) -> Callable:
    """Attention of one rank is not causal: all refuse the model, and a later call is right."""

    def run(runtime) -> dict:
        calls = Calls(case, runtime)
        core = unwrapped(calls.chunks[-1]).decoder.layers[-1].self_attention.core_attention
        softmax = core.scale_mask_softmax
        causal = softmax.attn_mask_type
        if dist.get_rank() == DEVIATING:
            softmax.attn_mask_type = None
        error = calls.error()
        softmax.attn_mask_type = causal
        return {"error": error, "distance": calls.distance()}

    return run


def change(case: cases.Case) -> Callable:
    """Code of one rank changes between two calls: all check the model again."""

    def run(runtime) -> dict:
        calls = Calls(case, runtime)
        calls.run(calls.shared)
        own = TransformerLayer.forward

        def forward(self, *args, **named):
            return own(self, *args, **named)

        is_deviating = dist.get_rank() == DEVIATING
        changed = mock.patch.object(TransformerLayer, "forward", forward)
        checks = mock.patch.object(SharedGPT, "_check", autospec=True, side_effect=SharedGPT._check)
        with changed if is_deviating else contextlib.nullcontext(), checks as check:
            found = calls.distance()
        return {"checks": check.call_count, "distance": found}

    return run


def sleep(case: cases.Case) -> Callable:
    """Nothing sleeps on one rank: all run the probes that the others need, and the call is right."""

    def run(runtime) -> dict:
        calls = Calls(case, runtime, sleep=int(os.environ["RANK"]) != DEVIATING)
        own = SharedGPT._run_probe
        with mock.patch.object(SharedGPT, "_run_probe", autospec=True, side_effect=own) as probe:
            found = calls.distance()
        return {"probes": probe.call_count, "distance": found}

    return run


def calls_of_chunks(runtime) -> dict:
    """Interleaved stages: batches that share no prompt, two calls of the same iterators, and an
    evaluation between them."""
    calls = Calls(CHUNKS, runtime)

    def whole() -> list:
        changed = [
            each | {"loss_mask": torch.ones_like(each["loss_mask"])} for each in cases.batches_of()
        ]
        return [iter(changed) for _ in calls.chunks]

    found = {"unshared": calls.distance(data_iterator=whole)}
    iterators = [iter([*cases.batches_of(), *cases.batches_of(1)]) for _ in calls.chunks]
    calls.run(calls.shared, data_iterator=iterators)
    with torch.no_grad():
        evaluated = [
            calls.run(function, forward_only=True)
            for function in (get_forward_backward_func(), calls.shared)
        ]
    found["evaluated"] = [[each["loss"] for each in own] for own in evaluated]
    calls.run(calls.shared, data_iterator=iterators)
    ours = cases.gradients(calls.chunks)
    cases.run(CHUNKS, get_forward_backward_func(), calls.chunks, cases.batches_of(1))
    return found | {"distance": distance(cases.gradients(calls.chunks), ours)}


def uneven_stages(runtime) -> dict:
    """K and V of prompts have room on the stage with one layer, not on that with three."""
    calls = Calls(UNEVEN, runtime)
    gpt = unwrapped(calls.chunks[0])
    gathered, _ = plan_of_readers(gpt, cases.PROMPT_TOKENS - 1)["exchange"]["prices"]
    with budget_of(2 * gathered["held_bytes"] // len(gpt.decoder.layers)):
        return {"error": calls.error()}


CASES = {
    "refusal of a stage": refusal(STAGES),
    "refusal of a chunk": refusal(CHUNKS),
    "refusal of a part": refusal(PARTS),
    "refusal of a replica's part of experts": refusal(EXPERTS),
    "change of a replica's part of experts": change(EXPERTS),
    "change of a stage": change(STAGES),
    "change of a part": change(PARTS),
    "sleep of a stage": sleep(STAGES),
    "sleep of a chunk": sleep(CHUNKS),
    "sleep of a part": sleep(PARTS),
    "sleep of a replica's part of experts": sleep(EXPERTS),
    "sleep of a part of a sequence": sleep(COLUMNS),
    "calls of chunks": calls_of_chunks,
}
CASES_OF_FOUR = {
    "refusal of a stage's part of experts": refusal(EXPERTS_OF_STAGES),
    "change of a stage's part of experts": change(EXPERTS_OF_STAGES),
    "sleep of a stage's part of experts": sleep(EXPERTS_OF_STAGES),
    "uneven stages": uneven_stages,
}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    untold = mock.patch.object(forward_backward, "fail_together", contextlib.nullcontext)
    with conftest.a_runtime() as runtime, untold:
        own = CASES_OF_FOUR if os.environ["WORLD_SIZE"] == "4" else CASES
        found = {name: run(runtime) for name, run in own.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
