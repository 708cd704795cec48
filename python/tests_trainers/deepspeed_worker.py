"""One rank of test_deepspeed.py: trains the cases of deepspeed_cases.py plainly and shared.

``python deepspeed_worker.py DIRECTORY [CASE...]``, with the environment of torchrun, leaves
``RANK.pt`` there: of each case, what :func:`trained` returns, plain and shared.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import conftest
import deepspeed
import deepspeed_cases as cases
import torch
from deepspeed.utils import safe_get_full_fp32_param
from padded_batch import mixed_loss, padded_values

import dormouse
from dormouse.hf import SharedPrefix


def trained(case: cases.Case, runtime: dormouse.Runtime | None) -> dict:
    """Gradients before each update, and weights after it. ``runtime``: with shared prompts."""
    engine = cases.engine_of(case)
    ids, mask, keep = cases.batch_of(engine.global_rank, engine.dp_world_size)
    values_of = padded_scores(engine, ids, mask, keep)
    if runtime is not None:
        shared = SharedPrefix(engine, runtime, sleep=case.sleep)
        values_of = shared_scores(shared, case, ids, mask, keep)
    found = {"gradients": [], "weights": []}
    for _ in range(cases.UPDATES):
        for rows in cases.parts(len(ids), case.accumulation):
            loss = mixed_loss(*values_of(rows), mask[rows, -keep:])
            if case.direct:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                found["gradients"].append(cases.gradients(engine))
            engine.step()
        found["weights"].append(weights(engine.module))
    engine.destroy()
    return found


def weights(model: torch.nn.Module) -> cases.Tensors:
    """The whole weights that the optimizer updates."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if whole is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        found[name] = whole.double()
    return found


def padded_scores(engine, ids, mask, keep):
    return lambda rows: padded_values(engine, ids[rows], mask[rows], keep)


def shared_scores(shared: SharedPrefix, case: cases.Case, ids, mask, keep):
    """Returns a function of the rows of a microbatch."""
    options = {"keep": keep, "entropy": True, "graphs": case.graphs, "microbatch_tokens": 7}

    def values_of(rows: slice):
        scores = shared.score(ids[rows], mask[rows], **options)
        return scores.log_probabilities, scores.entropies

    return values_of


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    cases.join_ranks()
    chosen = {name: cases.CASES[name] for name in names or cases.CASES}
    found = {}
    with conftest.a_runtime() as runtime:
        for name, case in chosen.items():
            found[name] = {"plain": trained(case, None), "shared": trained(case, runtime)}
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
