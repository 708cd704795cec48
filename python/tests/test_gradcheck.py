"""Distances to FP64 and their bounds: each figure by hand, and each bound seen to fail."""

from __future__ import annotations

import math

import pytest
import torch

from dormouse.demo import gradcheck


def runs(count: int, dense_error: float, shared_errors):
    """``count`` parameters of norm 1; each run off by the given relative distances."""
    truth, dense, shared = {}, {}, {}
    for i, error in zip(range(count), shared_errors, strict=True):
        exact = torch.zeros(4, dtype=torch.float64)
        exact[0] = 1.0
        off = torch.zeros(4, dtype=torch.float64)
        off[1] = 1.0
        truth[f"p{i}"] = exact
        dense[f"p{i}"] = exact + dense_error * off
        shared[f"p{i}"] = exact - error * off
    return truth, dense, shared


def compare(truth, dense, shared):
    return gradcheck.compare(truth.items(), dense, shared)


def test_figures_by_hand():
    truth = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])}
    dense = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.0, 12.0])}
    shared = {"a": torch.tensor([4.0, 4.0]), "b": torch.tensor([0.0, 12.5])}
    error = compare(truth, dense, shared)
    # Differences 0.5 and 1 for dense, 1 and 0.5 for shared; the truth's norm is 13.
    assert error.dense_global == pytest.approx(math.sqrt(1.25) / 13)
    assert error.shared_global == pytest.approx(math.sqrt(1.25) / 13)
    assert error.ratio_global == pytest.approx(1.0)
    assert error.ratio_max == pytest.approx(2.0)
    assert error.ratio_median == pytest.approx(0.5)
    assert error.worst_parameter == "a"


def of(**squares: tuple[float, float, float]) -> dict[str, gradcheck.Distance]:
    return {name: gradcheck.Distance(*each) for name, each in squares.items()}


RIGHT = of(a=(3.0, 0.1, 0.1), b=(1.0, 0.1, 0.1))
NAN = math.nan


def test_runs_are_compared_by_their_squares_and_each_counts_alike():
    runs = [
        of(a=(3.0, 1.0, 1.0), b=(1.0, 0.0, 0.0)),
        of(a=(300.0, 100.0, 225.0), b=(100.0, 0.0, 0.0)),
    ]
    error = gradcheck.compare_runs(runs)
    # Relative to 4 and 400: 1/4 twice, and 1/4 and 9/16, of two runs.
    assert error.ratio_global == pytest.approx(math.sqrt(1.625))
    assert (error.dense_global, error.worst_parameter) == (pytest.approx(0.5), "a")
    assert error.shared_global == pytest.approx(math.sqrt(0.8125 / 2))


def test_tiny_gradients_count_as_large_ones():
    small = of(a=(3e-9, 1e-9, 4e-9), b=(1e-9, 0.0, 0.0))
    error = gradcheck.compare_runs([of(a=(3.0, 1.0, 1.0), b=(1.0, 0.0, 0.0)), small])
    assert error.ratio_global == pytest.approx(math.sqrt(2.5))


@pytest.mark.parametrize("wrong", [
    of(a=(0.0, 0.0, 1e-9), b=(0.0, 0.0, 0.0)),  # a gradient where there is none
    of(a=(0.0, 1e-9, 0.0), b=(0.0, 1e-9, 0.0)),
    of(a=(0.0, 0.0, NAN), b=(0.0, 0.0, 0.0)),
    of(a=(NAN, NAN, NAN), b=(NAN, NAN, NAN)),
    of(a=(NAN, 0.1, 0.1), b=(1.0, 0.1, 0.1)),
    of(a=(3.0, NAN, 0.1), b=(1.0, 0.1, 0.1)),
    of(a=(3.0, math.inf, 0.1), b=(1.0, 0.1, 0.1)),
    of(a=(3.0, 0.1, math.inf), b=(1.0, 0.1, 0.1)),
], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_number_hides_behind_other_runs(wrong, at):
    runs = [RIGHT, RIGHT]
    assert gradcheck.compare_runs(runs).within_bounds
    runs.insert(at, wrong)
    assert not gradcheck.compare_runs(runs).within_bounds


def test_a_run_without_gradients_changes_nothing():
    nothing = of(a=(0.0, 0.0, 0.0), b=(0.0, 0.0, 0.0))
    assert gradcheck.compare_runs([RIGHT, nothing]) == gradcheck.compare_runs([RIGHT])


def test_without_any_gradient_nothing_is_within_bounds():
    """Nothing was compared."""
    nothing = of(a=(0.0, 0.0, 0.0), b=(0.0, 0.0, 0.0))
    assert not gradcheck.summarise(nothing).within_bounds
    assert not gradcheck.compare_runs([nothing, nothing]).within_bounds


@pytest.mark.parametrize(("ratio", "within"), [(3.9, True), (4.1, False)])
def test_one_run_of_many_has_a_bound_of_its_own(ratio, within):
    bad = of(a=(3.0, 0.1, 0.1 * ratio**2), b=(1.0, 0.1, 0.1 * ratio**2))
    error = gradcheck.compare_runs([RIGHT] * 63 + [bad])
    assert error.ratio_global < gradcheck.RATIO_GLOBAL_MAX
    assert error.within_bounds is within


@pytest.mark.parametrize("other", [of(a=(3.0, 0.1, 0.1)), of(**{k: (1, 0, 0) for k in "abc"})])
def test_runs_with_other_parameters_are_refused(other):
    with pytest.raises(ValueError, match="different parameters"):
        gradcheck.compare_runs([RIGHT, other])


def test_low_precision_gradients_are_compared_in_double():
    # 1 + 1e-9 is 1 in FP32: a difference taken in FP32 would be nothing.
    truth = {"a": torch.tensor([1.0 + 1e-9], dtype=torch.float64)}
    same = {"a": torch.tensor([1.0])}
    assert compare(truth, same, same).dense_global == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize(
    ("shared_errors", "within"),
    [
        ([1e-4] * 200, True),
        ([1.24e-4] * 200, True),
        ([1.3e-4] * 200, False),  # globally and in the median
        ([1.0e-4] * 99 + [1.35e-4] * 101, False),  # in the median alone
        ([0.5e-4] * 197 + [3e-4] * 3, False),  # at the 99th percentile
        ([0.5e-4] * 198 + [3e-4] * 2, True),
        ([0.5e-4] * 199 + [3.9e-4], True),
        ([0.5e-4] * 199 + [4.2e-4], False),  # in one parameter
    ],
)
def test_each_bound(shared_errors, within):
    error = compare(*runs(200, 1e-4, shared_errors))
    assert error.within_bounds is within


def test_the_absolute_allowance_covers_a_dense_run_without_error():
    error = compare(*runs(3, 0.0, [0.9e-6] * 3))
    assert error.within_bounds
    assert error.ratio_max == math.inf
    assert not compare(*runs(3, 0.0, [1.1e-6] * 3)).within_bounds


def test_a_run_equal_to_the_truth():
    error = compare(*runs(3, 0.0, [0.0] * 3))
    assert error.within_bounds
    assert (error.ratio_max, error.shared_global) == (0.0, 0.0)


def test_nan_is_never_within_bounds():
    truth, dense, shared = runs(3, 1e-4, [1e-4] * 3)
    shared["p1"] = torch.full((4,), float("nan"), dtype=torch.float64)
    error = compare(truth, dense, shared)
    assert not error.within_bounds
    assert error.ratio_max == math.inf


def test_a_gradient_where_there_should_be_none():
    truth, dense, shared = runs(2, 1e-4, [1e-4] * 2)
    truth["p0"] = dense["p0"] = torch.zeros(4, dtype=torch.float64)
    assert not compare(truth, dense, shared).within_bounds


@pytest.mark.parametrize("which", [1, 2])
def test_missing_and_unknown_parameters_are_refused(which):
    sides = runs(2, 1e-4, [1e-4] * 2)
    kept = sides[which].pop("p1")
    with pytest.raises(ValueError, match="'p1'"):
        compare(*sides)
    sides[which]["p1"] = kept
    sides[which]["p9"] = kept
    with pytest.raises(ValueError, match="'p9'"):
        compare(*sides)


def test_quantiles_are_values_that_occurred():
    values = list(range(1, 101))
    assert gradcheck.quantile(values, 0.5) == 50
    assert gradcheck.quantile(values, 0.99) == 99
    assert gradcheck.quantile([7.0], 0.99) == 7.0


def test_the_norm_is_of_all_gradients_and_not_finite_if_one_is_not():
    gradients = [torch.tensor([[3.0]]), torch.tensor([0.0, 4.0]).bfloat16()]
    assert gradcheck.norm(gradients) == 5.0
    assert gradcheck.norm([]) == gradcheck.norm([torch.zeros(2)]) == 0.0
    assert gradcheck.norm([torch.tensor([1e-30])]) > 0.0
    for bad in (math.nan, math.inf):
        assert not math.isfinite(gradcheck.norm([*gradients, torch.tensor([bad, 1.0])]))
