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
from dormouse.trainers import short_prompts


def trained(case: cases.Case, runtime: dormouse.Runtime | None) -> dict:
    """Gradients before each update, and weights after it. ``runtime``: with shared prompts."""
    engine = cases.engine_of(case)
    ids, mask, keep = cases.batch_of(engine.global_rank, engine.dp_world_size)
    values_of = padded_scores(engine, keep)
    if runtime is not None:
        _check_agreement(engine)
        shared = SharedPrefix(engine, runtime, sleep=case.sleep)
        values_of = shared_scores(shared, case, keep)
    found = {"gradients": [], "weights": []}
    for update in range(cases.UPDATES):
        for part, rows in enumerate(cases.parts(len(ids), case.accumulation)):
            batch = ids[rows], mask[rows]
            if case.is_silent(engine.global_rank, update, part):
                loss = silent_loss(values_of, case, *batch, keep)
            else:
                loss = mixed_loss(*values_of(*batch), mask[rows, -keep:])
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


def _check_agreement(engine) -> None:
    """What holds on one rank holds on every rank that runs collectives with it."""
    rank, last = engine.global_rank, engine.dp_world_size - 1
    assert short_prompts.on_any_rank(engine, rank == last, engine.device)
    assert not short_prompts.on_any_rank(engine, False, engine.device)
    with torch.no_grad():
        is_joint = engine.zero_optimization_stage() == 3
        found = short_prompts.on_any_rank(engine, rank == last, engine.device)
    assert found == (is_joint or rank == last)


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


def silent_loss(values_of, case: cases.Case, ids, mask, keep) -> torch.Tensor:
    if case.silent == "empty":
        mask = mask.clone()
        mask[:, -keep:] = 0
    return sum(each.sum() * 0 for each in values_of(ids, mask))


def padded_scores(engine, keep):
    return lambda ids, mask: padded_values(engine, ids, mask, keep)


def shared_scores(shared: SharedPrefix, case: cases.Case, keep):
    """Returns a function of the rows of a microbatch."""
    options = {"keep": keep, "entropy": True, "graphs": case.graphs, "microbatch_tokens": 7}

    def values_of(ids, mask):
        scores = shared.score(ids, mask, **options)
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
