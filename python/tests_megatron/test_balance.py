"""Routers that balance experts in other states than training, and losses without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from balance_worker import CASES, CHANGED, CONSTANT, FORWARD_ONLY, LOGGED, ORDERED, REFUSED
from rank_workers import left_by_each

from in_use import STAYS_BYTES_MAX

WORKER = Path(__file__).with_name("balance_worker.py")
SECONDS_MAX = 600
EXACT = 1e-10
# Of values that are logged in FP32.
LOGGED_TOLERANCE = 1e-6
ERRORS = {
    "the first stage evaluates": "RanksDifferError: ",
    "the first chunk evaluates": "UnsupportedTrainerError: one chunk of the model balances experts",
    "layers evaluate": "UnsupportedTrainerError: a router's training is False, and True",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    numbers = (1, 2)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", LOGGED)
def test_each_rank_logs_what_megatron_logs(name, found):
    for own in found[name]:
        tolerance = {"rtol": LOGGED_TOLERANCE, "atol": LOGGED_TOLERANCE}
        assert own["plain"].min() > 0
        torch.testing.assert_close(own["shared"], own["plain"], **tolerance)


@pytest.mark.parametrize("name", ORDERED)
def test_losses_are_logged_in_megatrons_order(name, found):
    """Replicas of which some share no prompt reduce them one by one."""
    for own in found[name]:
        assert len(own["plain"]) == 4
        assert own["shared"] == own["plain"]


@pytest.mark.parametrize("name", CHANGED)
def test_gradients_and_counts_are_those_of_megatron(name, found):
    for own in found[name]:
        assert own["difference"] <= EXACT * own["largest"]
        plain, shared = own["counted"]
        assert plain.keys() == shared.keys()
    for key in found[name][0]["counted"][0]:
        plain, shared = (
            sum(own["counted"][way][key] for own in found[name]) for way in (0, 1)
        )
        torch.testing.assert_close(shared, plain)


def test_tokens_are_counted_in_evaluation_mode(found):
    plain, _ = found["evaluation mode, biases"][0]["counted"]
    assert plain and all(each.sum() > 0 for each in plain.values())


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_call_without_a_backward_counts_and_logs_as_in_megatron(name, found):
    for own in found[name]:
        plain, shared = own["plain"], own["shared"]
        for key in ("losses", "logged", "counts"):
            torch.testing.assert_close(shared[key], plain[key], check_dtype=False)
        assert any(each.any() for counts in plain["counts"] for each in counts.values())
        # With one that shares none, no replica does: they sum counts together.
        assert (shared["prompts"] > 0) == (FORWARD_ONLY[name].unshared_ranks == ())


@pytest.mark.parametrize("name", CONSTANT)
def test_a_loss_may_be_a_constant(name, found):
    for own in found[name]:
        assert (own["largest"] == 0) == name.startswith("all losses")
        assert own["difference"] <= EXACT * own["largest"]


@pytest.mark.parametrize("name", REFUSED)
def test_parts_in_other_modes_are_refused_by_name(name, found):
    assert all(own["error"].startswith(ERRORS[name]) for own in found[name])


@pytest.mark.parametrize("name", CASES)
def test_prompts_sleep_and_none_stays_asleep(name, found):
    for own in found[name]:
        # Without gradients of its layers, or a loss of its rows, a prompt keeps nothing.
        is_awake = name.startswith(("the head alone", "all losses"))
        assert (own["asleep_peak"] > 0) != is_awake
        assert own["asleep"] == 0


@pytest.mark.parametrize("name", CONSTANT | REFUSED)
def test_nothing_stays_awake(name, found):
    assert all(own["stays"] < STAYS_BYTES_MAX for own in found[name])
