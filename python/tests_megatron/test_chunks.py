"""In how many chunks stages run prompts."""

from __future__ import annotations

import random

import on_cpu  # noqa: F401
import pytest

from dormouse import queries
from dormouse.errors import ArgumentError
from dormouse.megatron import chunks, share

# Of the planner's time with the best number of chunks.
WORSE_MAX = 1.03


def lists_of(groups: list[list[int]], count: int, rows_min: int, **shape: int) -> dict:
    cut = {"chunks": count, "chunk_rows_min": rows_min, "order": "stream"}
    return queries.pipeline(list(map(chunks.described, groups)), **cut, **shape)


def chosen(groups: list[list[int]], rows_min: int, stages: int) -> int:
    return chunks.chosen(groups, rows_min, stages=stages, virtual_stages=1)


def test_one_stage_runs_prompts_whole():
    assert chosen([[8000, 500, 500]], 500, 1) == 1


def test_more_stages_take_more_chunks():
    numbers = [chosen([[6000, *[500] * 8]], 500, stages) for stages in (2, 4, 8)]
    assert numbers == sorted(numbers)
    assert 1 < numbers[0] < numbers[-1]


def test_many_groups_take_fewer_chunks():
    assert chosen([[6000, *[500] * 8]] * 16, 500, 4) < chosen([[6000, *[500] * 8]], 500, 4)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_lists_end_about_as_soon_as_with_the_best_number(virtual_stages):
    drawn = random.Random(0)
    for stages in (2, 3, 4, 6):
        groups = [
            [drawn.randint(1, 4000), *(drawn.randint(100, 500) for _ in range(drawn.randint(1, 6)))]
            for _ in range(drawn.randint(1, 4))
        ]
        shape = {"stages": stages, "virtual_stages": virtual_stages}
        times = {
            count: lists_of(groups, count, 500, **shape)["report"]["makespan_ns"]
            * (1 + chunks.PART_SHARE * (count - 1))
            for count in range(1, 9)
        }
        count = chunks.chosen(groups, 500, **shape)
        assert times[count] <= WORSE_MAX * min(times.values()), (groups, shape, count, times)


def test_chunks_have_at_least_the_least_rows():
    groups = [[4000, 500], [1100, 500], [400, 500]]
    ends = chunks.ends_of(groups, chunks=8, chunk_rows_min=500)
    assert [len(each) for each in ends] == [8, 2, 1]
    assert [each[-1] for each in ends] == [4000, 1100, 400]


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_lists_of_all_stages_are_cut_alike(virtual_stages):
    groups, cut = [[301, 40, 9], [77, 5], [3, 5]], {"chunks": 5, "chunk_rows_min": 20}
    shape = {"stages": 3, "virtual_stages": virtual_stages, "order": "stream"}
    lists = queries.pipeline(list(map(chunks.described, groups)), **cut, **shape)
    ends = chunks.ends_of(groups, **cut)
    for stage in lists["stages"]:
        for op in stage["ops"]:
            if op["kind"].startswith("prefix"):
                assert op["rows"]["end"] == ends[op["group"]][op["index"]]


@pytest.mark.parametrize("wanted", [0, -1, 1025])
def test_other_numbers_are_refused(wanted):
    with pytest.raises(ArgumentError, match=f"prompt_chunks is {wanted}; accepted: None, or 1 to"):
        share(lambda: None, prompt_chunks=wanted)
