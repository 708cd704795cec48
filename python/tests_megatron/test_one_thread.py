"""Calls of the schedule for one model on two threads: the second is refused, and the first stays
exact, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_workers import RANKS, left_by_each

from in_use import STAYS_BYTES_MAX
from threads_worker import CASES, END, LOSS, PASSES, READ, SECOND_CALLS

WORKER = Path(__file__).with_name("threads_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10
FIRST = ("one rank", "two stages")
REFUSED = (
    "StateError: thread 'MainThread' runs passes of this model; accepted: one thread at a time"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    numbers = (1, RANKS)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", CASES)
def test_calls_on_another_thread_are_refused(name, found):
    """Wherever the first thread is in its own, and although other ranks are not."""
    refused = {call: {REFUSED} for call in SECOND_CALLS}
    for rank, own in enumerate(found[name]):
        places = {READ, PASSES, END}
        if rank == len(found[name]) - 1:
            places.add(LOSS)
        assert own["errors"] == dict.fromkeys(places, refused)
        assert own["first"] < EXACT


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_free_afterwards(name, found):
    """The next call is on another thread. A rank begins it while the last one, which refuses
    calls, is still in the first."""
    for own in found[name]:
        assert own["error"] is None
        assert own["next"] < EXACT


@pytest.mark.parametrize("name", CASES)
def test_a_backward_may_run_on_a_thread_of_its_own(name, found):
    assert all(own["backward"] < EXACT for own in found[name])


@pytest.mark.parametrize("name", CASES)
def test_an_error_lets_go(name, found):
    *others, last = found[name]
    assert last["raised"] == "FloatingPointError"
    assert all(each["raised"] == "RankFailedError" for each in others)
    for own in found[name]:
        assert own["after an error"] is None
        assert own["asleep_peak"] > 0 and own["asleep"] == 0
        # The first case of a process allocates what stays for all.
        assert name in FIRST or own["stays"] < STAYS_BYTES_MAX
