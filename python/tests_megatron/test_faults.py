"""What happens to a step and is no failure: a late rank, a rank without groups, an evaluation
between the passes. The step is right, nothing stays asleep, and so is the next one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_use import has_last_layer_alone
from rank_workers import RANKS, left_by_each

from faults_worker import CASES, ENDED, EVALUATED, FROZEN, LATE, LATE_S, NO_LOSS, SHARES

WORKER = Path(__file__).with_name("faults_worker.py")
SECONDS_MAX = 600
EXACT = 1e-10
BEGUN_LATER_S_MAX = 1.0
# Of a call in which every replica shares.
PROMPTS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    numbers = (RANKS, 4)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", LATE)
def test_a_late_rank_is_waited_for(name, found):
    for own in found[name]:
        assert own["error"] is None
        assert own["late"] < EXACT
    # The late rank itself, and one that waited for it and may have begun a little later.
    assert all(own["seconds"] >= LATE_S - BEGUN_LATER_S_MAX for own in found[name])


@pytest.mark.parametrize("name", SHARES)
def test_a_rank_may_have_less_than_others(name, found):
    assert all(own["distance"] < EXACT for own in found[name])


@pytest.mark.parametrize("name, prompts", [
    ("replica 1 has no loss", (PROMPTS, 0)),
    ("replica 0 shares no prompt", (0, PROMPTS)),
    # Reductions that overlap are in the order in which gradients arrive.
    ("replica 1 has no loss, overlapped", (0, 0)),
    ("replica 0 has no loss, sharded optimizer", (0, PROMPTS)),
    ("a microbatch without loss, two stages", (PROMPTS, PROMPTS)),
    # So are passes with experts of both.
    ("replica 1 has no loss, experts on both", (0, 0)),
    ("replica 0 shares no prompt, experts on both", (0, 0)),
    ("replica 1 has more prompts, experts on both", (PROMPTS, PROMPTS + 2)),
    ("replica 0 has fewer responses, experts on both", (PROMPTS, PROMPTS)),
    ("replica 0 shares no prompt, balanced over both", (0, 0)),
    # Rows without a loss count too, and share what they begin with.
    ("replica 1 has no loss, balanced, experts on both", (PROMPTS + 1, PROMPTS)),
    ("replica 1 of two stages has no loss", (PROMPTS, 0, PROMPTS, 0)),
    ("replica 1 of two stages of two chunks has no loss", (PROMPTS, 0, PROMPTS, 0)),
    ("replica 1 of two stages has no loss, overlapped", (0, 0, 0, 0)),
    ("replica 1 of two stages has no loss, experts on both", (0, 0, 0, 0)),
    (
        "replica 1 of two stages has more prompts, experts on both",
        (PROMPTS, PROMPTS + 2, PROMPTS, PROMPTS + 2),
    ),
    ("replica 0 of two stages has fewer responses, experts on both", (PROMPTS,) * 4),
])
def test_the_other_ranks_share(name, prompts, found):
    assert tuple(own["prompts"] for own in found[name]) == prompts


@pytest.mark.parametrize("name", ENDED)
def test_data_that_end_on_all_ranks_are_no_failure(name, found):
    assert all(own["error"] == "StopIteration" for own in found[name])


@pytest.mark.parametrize("name", NO_LOSS)
def test_no_loss_is_no_gradient(name, found):
    assert all(own["largest"] == 0 for own in found[name])


@pytest.mark.parametrize("name", FROZEN)
def test_a_stage_may_be_frozen(name, found):
    for own in found[name]:
        assert (own["largest"] == 0) == own["is_frozen"]
        assert own["difference"] <= EXACT * own["largest"]


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_between_the_passes(name, found):
    for own in found[name]:
        assert own["distance"] < EXACT
        plain, shared = own["evaluated"]["plain"], own["evaluated"]["shared"]
        # Of two models, in the losses of three microbatches.
        assert len(shared) == 6 and (shared[::2] != shared[1::2]).all()
        torch.testing.assert_close(shared, plain, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", CASES)
def test_nothing_stays_asleep_and_the_next_call_is_right(name, found):
    """Each case has a call in which prompts sleep."""
    for rank, own in enumerate(found[name]):
        assert (own["asleep_peak"] > 0) != has_last_layer_alone(CASES[name].case, rank)
        assert own["asleep"] == 0
        # A late rank's own call follows one in time.
        assert own.get("next", own.get("late")) < EXACT
