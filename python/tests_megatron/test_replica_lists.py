"""Rows of all replicas of a pipeline are assigned by the ends of their lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_workers import left_by_ranks
from replica_lists_worker import BOUND, CASES, EVALUATED, FREE, PROMPTS, ROOM_SHARE

import long_rows

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


@pytest.mark.parametrize("name", CASES)
def test_groups_are_cut_by_work_where_stages_have_room(name, found):
    for call in ("first", FREE):
        assert any(
            rows < ROWS_OF_GROUP for own in found[name] for rows in own["prompts"][call]
        )


@pytest.mark.parametrize("name", CASES)
def test_groups_are_whole_where_a_stage_lacks_room_and_lists_end_sooner(name, found):
    for own in found[name]:
        assert own["prompts"][BOUND] == [ROWS_OF_GROUP] * (len(PROMPTS) // 2)
    first = found[name][0]["peaks"]
    (free,), (bound,) = first[FREE], first[BOUND]
    assert bound["bytes"] <= ROOM_SHARE * free["bytes"]


@pytest.mark.parametrize("name", CASES)
def test_a_call_without_lists_is_assigned_by_work(name, found):
    for own in found[name]:
        assert own["prompts"][EVALUATED] == own["prompts"][FREE]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_losses_are_those_of_megatron(name, found):
    for own in found[name]:
        assert own["distance"] < EXACT
        free, bound = own["losses"][FREE], own["losses"][BOUND]
        assert len(free) == len(bound)
        for one, other in zip(free, bound, strict=True):
            assert other["loss"].item() == pytest.approx(one["loss"].item(), rel=EXACT)
