"""A multiplicity that is wrong by one is seen by the comparison of test_gradients.py below FP64
(docs/method.md §10)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from multiplicity_worker import CASES
from rank_workers import left_by_ranks

import cases
import conftest
import expert_counts
from dormouse.demo import gradcheck
from dormouse.hf.prefix import PlannedForward
from dormouse.megatron.balancing import Balancing
from dormouse.megatron.shared_gpt import SharedGPT

SHARE = {"graphs": "twice", "microbatch_tokens": 9}
CASE = cases.Case(config=cases.EXPERTS, share=SHARE)
BALANCED = cases.Case(config=cases.BALANCED, share=SHARE)
DTYPES = (torch.float32, torch.bfloat16)
WORKER = Path(__file__).with_name("multiplicity_worker.py")
SECONDS_MAX = 900
# Which changes no gradient of the call that counts.
SELECTED = "selected experts"


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


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    """What each of two ranks left of each case."""
    directory = tmp_path_factory.mktemp("multiplicity")
    return left_by_ranks(WORKER, directory, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_ranks_count_each_once(of_two_ranks, name, times):
    """And dummies never. One rank alone counts wrongly, one thing in each call."""
    found = [own[times] for own in of_two_ranks[name]]
    is_right = times == CASES[name].right
    # The context finds what it is to change.
    assert max(own["changed"] for own in found) == cases.CALLS_OF[torch.float32]
    theirs, ours = zip(*(own["balance"] for own in found), strict=True)
    differing = expert_counts.differing(theirs, ours)
    if name == SELECTED:
        assert (differing == []) == is_right
        return
    assert all(own["within"] for own in found) == is_right
    # One wrong call of several is seen, too.
    for of_call in zip(*(own["one_within"] for own in found), strict=True):
        assert all(of_call) == is_right
