"""One rank of the cases of two ranks of test_multiplicity.py, over gloo.

``python multiplicity_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt``
there: of each of :data:`CASES`, what :func:`compared` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import conftest
import torch
import torch.distributed as dist

import cases
import wrong_counts
from dormouse.demo import gradcheck
from dormouse.runtime import Runtime

DTYPE = torch.float32
MICROBATCHES = {"microbatch_tokens": 9}
BIASED = cases.EXPERTS | {
    "moe_router_bias_update_rate": 0.05,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


class Counted(NamedTuple):
    """What is counted in a case."""

    case: cases.Case
    context: wrong_counts.Counts
    right: int = 1
    """How often it counts."""


CASES = {
    "gathered K and V at their owner": Counted(
        cases.Case(2, context_parallel=2), wrong_counts.gathered
    ),
    "passing sums of K and V": Counted(
        cases.Case(2, context_parallel=2, ring=True, share=MICROBATCHES), wrong_counts.ringed
    ),
    "K and V of a prompt's chunk": Counted(
        cases.Case(2, stages=2, share=MICROBATCHES | {"prompt_chunks": 3}), wrong_counts.of_chunks
    ),
    "a row of another replica": Counted(cases.Case(2, share=cases.ACROSS), wrong_counts.moved),
    "a dummy microbatch": Counted(
        cases.Case(2, expert_parallel=2, config=cases.EXPERTS, share=MICROBATCHES),
        wrong_counts.of_dummies,
        right=0,
    ),
    "a dummy microbatch in routers": Counted(
        # With as many groups no replica runs a dummy: responses go on to the last column.
        cases.Case(
            2, expert_parallel=2, config=cases.BALANCED, share=MICROBATCHES, has_third=True
        ),
        wrong_counts.of_dummy_routers,
        right=0,
    ),
    "selected experts": Counted(
        cases.Case(2, context_parallel=2, config=BIASED), wrong_counts.selected
    ),
}


def compared(counted: Counted, runtime: Runtime) -> dict:
    """Returns, for each number of times that something counts, whether gradients are within the
    bounds of all calls, whether they are with each call alone being wrong, which counts of experts
    differ in the first call, and in how many calls this rank changed something."""
    case = counted.case
    cases.join(case)
    megatron = [
        cases.trained(each, None) for each in (case.truth_of(DTYPE), case.of_dtype(DTYPE))
    ]
    right, found = [], {}
    for times in sorted({0, 1, 2}, key=lambda times: times != counted.right):
        with counted.context(times) as calls:
            ours = cases.trained(case.of_dtype(DTYPE), runtime)
        of_ways = (each["gradients"] for each in (*megatron, ours))
        runs = [
            gradcheck.distances_of(exact.items(), *others)
            for exact, *others in zip(*of_ways, strict=True)
        ]
        right = right or runs
        alone = [[*right[:at], runs[at], *right[at + 1 :]] for at in range(len(runs))]
        found[times] = {
            "within": gradcheck.compare_runs(runs).within_bounds,
            "one_within": [gradcheck.compare_runs(each).within_bounds for each in alone],
            "balance": [each["balance"][0] for each in (megatron[1], ours)],
            "changed": sum(calls.changed),
        }
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with conftest.a_runtime() as runtime:
        found = {name: compared(counted, runtime) for name, counted in CASES.items()}
    torch.save(found, directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
