"""A multiplicity that is wrong by one is seen by the comparison of test_gradients.py below FP64
(docs/method.md §10)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

import cases
import conftest
from dormouse.demo import gradcheck
from dormouse.hf.prefix import PlannedForward
from dormouse.megatron.balancing import Balancing
from dormouse.megatron.shared_gpt import SharedGPT

SHARE = {"graphs": "twice", "microbatch_tokens": 9}
CASE = cases.Case(config=cases.EXPERTS, share=SHARE)
BALANCED = cases.Case(config=cases.BALANCED, share=SHARE)
DTYPES = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def counted(times: int) -> Iterator[None]:
    """Context in which K and V of each prompt get the gradients of one microbatch so often."""
    add, check = PlannedForward.accumulate, SharedGPT._check
    is_checked = False

    def accumulate(self, layer, slot, grad):
        seen = vars(self).setdefault("seen", set())
        is_other = is_checked or (layer, slot) in seen
        seen.add((layer, slot))
        for _ in range(1 if is_other else times):
            add(self, layer, slot, grad)

    def right(self, *args, **named):
        nonlocal is_checked
        is_checked = True
        try:
            return check(self, *args, **named)
        finally:
            is_checked = False

    # The check would refuse the model.
    with (
        mock.patch.object(PlannedForward, "accumulate", accumulate),
        mock.patch.object(SharedGPT, "_check", right),
    ):
        yield


@contextlib.contextmanager
def balanced(times: int) -> Iterator[None]:
    """Context in which a prompt counts the losses of routers of one of its rows so often."""
    give = Balancing._give

    def given(self, of_scores, of_squares):
        give(self, of_scores, of_squares)
        group = self._groups + self._group_of_row()[0]
        self.of_scores[:, group] += (times - 1) * of_scores[:, 0]
        self.of_squares[group] += (times - 1) * of_squares[0]

    with mock.patch.object(Balancing, "_give", given):
        yield


@pytest.fixture(scope="module")
def runs_of() -> Iterator[Callable]:
    """Returns a function that returns the distances of each call of a case in a context."""
    cases.join()
    megatrons: dict[tuple, list] = {}

    def runs(name: str, case: cases.Case, dtype: torch.dtype, context) -> list[dict]:
        if (name, dtype) not in megatrons:
            both = case.truth_of(dtype), case.of_dtype(dtype)
            megatrons[name, dtype] = [cases.trained(each, None)["gradients"] for each in both]
        with context:
            ours = cases.trained(case.of_dtype(dtype), runtime)["gradients"]
        calls = zip(*megatrons[name, dtype], ours, strict=True)
        return [gradcheck.distances_of(exact.items(), *others) for exact, *others in calls]

    with conftest.a_runtime() as runtime:
        yield runs


of_each = pytest.mark.parametrize("name, case, context", [
    ("microbatches", CASE, counted), ("rows of routers", BALANCED, balanced)
])
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("times", [0, 1, 2])
@of_each
@of_dtypes
def test_only_once_is_within_the_bounds(runs_of, name, case, context, dtype, times):
    error = gradcheck.compare_runs(runs_of(name, case, dtype, context(times)))
    assert error.within_bounds == (times == 1), error


@pytest.mark.parametrize("times", [0, 2])
@of_each
@of_dtypes
def test_one_wrong_call_is_seen(runs_of, name, case, context, dtype, times):
    right, wrong = (runs_of(name, case, dtype, context(each)) for each in (1, times))
    for at in range(len(right)):
        error = gradcheck.compare_runs([*right[:at], wrong[at], *right[at + 1 :]])
        assert not error.within_bounds, (at, error)
