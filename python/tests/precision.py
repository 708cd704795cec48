"""Gradients of a trainer plain and with shared prompts in FP32 and BF16, beside its own in FP64, by
the bounds of docs/method.md §10.

A worker of one or two ranks trains every case of :data:`CASES` in every way (:func:`leave`); a test
reads what ranks left and compares it (:func:`assert_as_near_as_plain`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from model_zoo import in_fp64
from models import tiny
from rank_workers import run_ranks
from steady_moe import steady_moe

import dormouse
from dormouse.demo import gradcheck

WAYS = ("truth", "plain", "shared")
# Of token 0 a batch is padded, token 1 ends a text.
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
Gradients = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """``experts``: a mixture of experts. ``autocast``: to BF16, of FP32 weights."""

    experts: bool
    dtype: torch.dtype
    autocast: bool = False

    def made(self, dtype: torch.dtype) -> torch.nn.Module:
        return (steady_moe if self.experts else tiny)(dtype=dtype, **SPECIAL)


# Of a case, a way and the model to train: gradients before each update, or of each batch.
Train = Callable[[Case, str, torch.nn.Module], Gradients]

PRECISIONS = {
    "FP32": {"dtype": torch.float32},
    "BF16": {"dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": True},
}
CASES = {
    f"{kind}, {precision}": Case(kind == "experts", **settings)
    for kind in ("dense", "experts")
    for precision, settings in PRECISIONS.items()
}


def leave(directory: Path, runtime: dormouse.Runtime, gradients_of: Train, kind: str = "") -> None:
    """Leaves the gradients of every case and way. ``kind``: of trainers, where there are several."""
    found = {}
    for name, case in CASES.items():
        found[name] = {}
        for way in WAYS:
            runtime.reset_peaks()
            found[name][way] = trained(case, way, gradients_of)
            slept = runtime.stats()["asleep"]["peak_bytes"]
            assert (slept > 0) == (way == "shared"), (kind, name, way, slept)
    torch.save(found, directory / f"{os.environ['RANK']} {kind}.pt")


def trained(case: Case, way: str, gradients_of: Train) -> Gradients:
    model = case.made(torch.float32).to(case.dtype)
    if way != "truth":
        return gradients_of(case, way, model)
    weights = model.state_dict()
    with in_fp64():
        model = case.made(torch.float64)
        model.load_state_dict(weights)
        return gradients_of(replace(case, dtype=torch.float64, autocast=False), way, model)


def run(worker: Path, directory: Path, ranks: int, *arguments, **options) -> None:
    """Runs the ranks. ``arguments``, ``options``: of :func:`run_ranks`."""
    codes = run_ranks(worker, directory, *arguments, ranks=ranks, **options)
    assert codes == [0] * ranks


def left(directory: Path, ranks: int, kind: str = "") -> list:
    """Returns what each rank left."""
    return [torch.load(directory / f"{rank} {kind}.pt") for rank in range(ranks)]


def assert_as_near_as_plain(found: dict[str, Gradients]) -> None:
    """Of all updates or batches together, as BF16's ratio of one run scatters."""
    runs = zip(*(found[way] for way in WAYS), strict=True)
    distances = [
        gradcheck.distances_of(truth.items(), plain, shared) for truth, plain, shared in runs
    ]
    error = gradcheck.compare_runs(distances)
    print(error)
    assert 0 < error.dense_global < 0.1, "nothing is compared, or with noise"
    assert error.within_bounds, error
