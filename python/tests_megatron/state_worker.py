"""One rank of test_state.py, over gloo: two stages.

``python state_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there: of
each of :data:`CHANGES` the error of a call, and what :func:`checks_of_calls` returns. Each has
process groups of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import conftest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
from agreement_worker import CHUNKS, Calls
from dormouse.megatron.refusals import nested
from dormouse.megatron.shared_gpt import SharedGPT
from failing_worker import STAGES, joined
from models import distance


@contextlib.contextmanager
def scaled(model: torch.nn.Module) -> Iterator[None]:
    """Context in which a layer has another attribute, as with adapters that are switched off."""
    softmax = nested(model)[-1].decoder.layers[-1].self_attention.core_attention.scale_mask_softmax
    own, softmax.scale = softmax.scale, 0.5
    try:
        yield
    finally:
        softmax.scale = own


def narrow(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16)


def around_call(context: Callable) -> Callable:
    def forward_step(data_iterator, model):
        with context(model):
            return cases.forward_step(STAGES, data_iterator, model)

    return forward_step


def behind_last_call() -> Callable:
    """A mode changes in the last loss."""
    numbers = iter(range(3))

    def forward_step(data_iterator, model):
        losses, own = cases.forward_step(STAGES, data_iterator, model)

        def loss_func(given):
            if next(numbers) == 2:
                nested(model)[-1].decoder.layers[-1].mlp.eval()
            return own(given)

        return losses, loss_func

    return forward_step


# Layouts and forward steps.
CHANGES = {
    "an attribute": (STAGES, around_call(scaled)),
    "an attribute of a chunk": (CHUNKS, around_call(scaled)),
    "a mode behind the last call": (STAGES, behind_last_call()),
    "autocast": (STAGES, around_call(narrow)),
}


def error_of(case: cases.Case, forward_step: Callable, runtime) -> str | None:
    """Returns the error of a call that follows a right one."""
    calls = Calls(case, runtime)
    calls.run(calls.shared)
    try:
        calls.run(calls.shared, forward_step_func=forward_step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def checks_of_calls(runtime) -> dict:
    """Returns how often parts are checked in calls of 3, 2 and 3 microbatches, with one in between
    that shares nothing, and how far the last one's gradients are from Megatron's own."""
    calls, own = Calls(STAGES, runtime), SharedGPT._check
    batches = cases.batches_of()
    with mock.patch.object(SharedGPT, "_check", autospec=True, side_effect=own) as check:
        for each in (batches, batches[:2], batches[:1], batches):
            cases.run(STAGES, calls.shared, calls.chunks, each)
    ours = cases.gradients(calls.chunks)
    calls.run(get_forward_backward_func())
    return {"checks": check.call_count, "distance": distance(cases.gradients(calls.chunks), ours)}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, (case, forward_step) in CHANGES.items():
            with joined(directory / name, case):
                found[name] = error_of(case, forward_step, runtime)
        with joined(directory / "checks", STAGES):
            found["checks"] = checks_of_calls(runtime)
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
