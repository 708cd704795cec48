"""One rank of test_refused_stages.py, over gloo: two stages of a model that Megatron trains and
shared passes do not, and a schedule that is not Megatron's own.

``python refused_stages_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: of each of :data:`REFUSED` the error, and how far gradients of the next call are from
Megatron's own. Each has process groups of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import conftest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear

import cases
import dormouse.megatron
from agreement_worker import Calls
from dormouse.megatron.refusals import unwrapped
from failing_worker import STAGES, joined


@dataclass(frozen=True)
class Refused:
    """A model that all stages refuse, or one of them."""

    make: Callable[[cases.Case], list[torch.nn.Module]] = cases.chunks_of
    config: dict = dataclasses.field(default_factory=dict)
    is_trained: bool = True
    """Whether Megatron's own schedule runs it before."""
    around: Callable[[Callable], Callable] = lambda schedule: schedule
    """Returns the schedule that the trainer has."""


class Predicting(cases.ExactGPT):
    """Predicts several tokens on its last stage."""

    def __init__(self, config, spec, **named):
        own = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        super().__init__(config, spec, mtp_block_spec=own, **named)


def predicting(case: cases.Case) -> list[torch.nn.Module]:
    with mock.patch.object(cases, "ExactGPT", Predicting):
        return cases.chunks_of(case)


def with_value_head(case: cases.Case) -> list[torch.nn.Module]:
    """The last stage returns a number for each token."""
    chunks = cases.chunks_of(case)
    gpt = unwrapped(chunks[-1])
    if gpt.post_process:
        config = gpt.config
        gpt.output_layer = ColumnParallelLinear(
            config.hidden_size, 1, config=config, init_method=config.init_method, bias=False
        )
    return chunks


def wrapped(schedule: Callable) -> Callable:
    """Returns a schedule with something around it, of the same name."""

    @functools.wraps(schedule)
    def around(**named):
        return schedule(**named)

    return around


WITHOUT_LAYERS = {
    "pipeline_model_parallel_layout": [["embedding", *["decoder"] * cases.LAYERS], ["loss"]]
}
REFUSED = {
    "several tokens are predicted": Refused(predicting, {"mtp_num_layers": 1}),
    # Megatron has no losses of tokens for it.
    "a value head": Refused(with_value_head, is_trained=False),
    "a stage without layers": Refused(config=WITHOUT_LAYERS),
    "a schedule in a partial": Refused(around=functools.partial),
    "a schedule in a function": Refused(around=wrapped),
}


def error_of(refused: Refused, runtime) -> dict:
    """Returns the error of a call, when it began and when the error came."""
    case = dataclasses.replace(STAGES, config=refused.config)
    own = refused.around(get_forward_backward_func())
    chunks, found = refused.make(case), {}
    function = dormouse.megatron.share(own, runtime=runtime, **case.share)
    if refused.is_trained:
        cases.run(case, own, chunks, cases.batches_of())
        found["is_trained"] = any(each.any() for each in cases.gradients(chunks).values())
    found["began_s"] = time.monotonic()
    try:
        cases.run(case, function, chunks, cases.batches_of())
    except Exception as error:
        found |= {"error": f"{type(error).__name__}: {error}", "told_s": time.monotonic()}
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, refused in REFUSED.items():
            with joined(directory / name, STAGES):
                found[name] = error_of(refused, runtime)
            with joined(directory / f"{name}, next", STAGES):
                found[name]["next"] = Calls(STAGES, runtime).distance()
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
