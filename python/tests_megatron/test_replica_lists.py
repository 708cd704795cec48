"""Rows of all replicas of a pipeline are assigned by the ends of their lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rank_workers import left_by_ranks
from replica_lists_worker import CASES

import long_rows
from dormouse.megatron import replica_lists
from dormouse.megatron.held import Gathered

WORKER = Path(__file__).with_name("replica_lists_worker.py")
RANKS = 4
SECONDS_MAX = 300
EXACT = 1e-10
# Each replica has them all.
ROWS_OF_GROUP = 2 * len(long_rows.RESPONSES)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    directory = tmp_path_factory.mktemp("replica_lists")
    return left_by_ranks(WORKER, directory, ranks=RANKS, seconds_max=SECONDS_MAX)


def test_groups_are_whole_where_lists_then_end_sooner(found):
    for own in found["even"]:
        assert own["ran"][:2] == [[ROWS_OF_GROUP] * 2] * 2


def test_a_group_is_cut_where_lists_then_end_sooner(found):
    for own in found["odd"]:
        for rows in own["ran"][:2]:
            assert len(rows) == 2
            assert min(rows) < max(rows) == ROWS_OF_GROUP


def test_a_call_without_lists_is_cut(found):
    for name in CASES:
        *_, evaluated = found[name][0]["ran"]
        assert min(evaluated) < ROWS_OF_GROUP


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_losses_are_those_of_megatron(name, found):
    for own in found[name]:
        assert own["distance"] < EXACT
        for shared, dense in own["losses"]:
            # Megatron's cross entropy computes in FP32.
            assert shared == pytest.approx(dense, rel=1e-5, abs=1e-5)


class Plans:
    """In place of a stage's parts of the model, whose places are rows of groups."""

    gpt = None

    def __init__(self):
        self.held = None

    def rows(self, places, microbatch_tokens):
        return places

    def own_rows(self, rows):
        return rows


# Two halves of groups have less to run than one group of ten microbatches, and more to hold.
HALVES = [[300] + [200] * 4] * 2
WHOLE = [[300] + [200] * 10]
HELD = {"boundary": 100, "microbatch_saved": 1}
OF_ONE_GROUP, OF_TWO = 45_000, 100_000


@pytest.fixture
def chosen(monkeypatch):
    """Returns the places that a replica runs, by what its stages hold, and the messages."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    state = replica_lists.parallel_state
    monkeypatch.setattr(state, "get_pipeline_model_parallel_group", lambda: group)
    sent = []

    def choose(figures: Gathered, *dealt, others=(0, 0)):
        def largest(gpt, numbers, group=None):
            sent.append((group, list(numbers)))
            return list(numbers) if group is None else list(map(max, numbers, others))

        monkeypatch.setattr(replica_lists, "largest", largest)
        monkeypatch.setattr(replica_lists, "gathered", lambda *own: figures)
        parts = [SimpleNamespace(places=each, group="replicas") for each in dealt]
        return replica_lists.sooner([Plans()], parts, 1, 200).places

    choose.sent = sent
    return choose


def test_rooms_decide_what_ends_sooner(chosen):
    assert chosen(Gathered([], [0, 0]), HALVES, WHOLE) is HALVES
    assert chosen(Gathered([HELD] * 2, [OF_TWO] * 2), HALVES, WHOLE) is HALVES
    assert chosen(Gathered([HELD] * 2, [OF_ONE_GROUP, OF_TWO]), HALVES, WHOLE) is WHOLE


def test_the_replica_that_ends_last_decides(chosen):
    figures = Gathered([], [0, 0])
    late = 1 << 40
    assert chosen(figures, HALVES, WHOLE, others=(late, 0)) is WHOLE
    assert chosen(figures, HALVES, WHOLE, others=(late, late)) is HALVES
    assert {group for group, _ in chosen.sent} == {None, "replicas"}


def test_what_does_not_fit_runs_only_if_nothing_does(chosen):
    nothing = Gathered([HELD] * 2, [1, 1])
    assert chosen(nothing, HALVES, WHOLE) is HALVES
    # The prompt of the halves has no room.
    long = [[600, 200]]
    assert chosen(Gathered([HELD] * 2, [OF_ONE_GROUP] * 2), long, WHOLE) is WHOLE


def test_a_replica_may_have_no_rows(chosen):
    assert chosen(Gathered([], [0, 0]), [], WHOLE) == []
