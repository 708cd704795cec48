"""The parts of the benchmark of parallel dimensions that need no processes."""

from __future__ import annotations

import gradient_rows
import peak_rows
import pipelines
import pytest

from lines import changed_lines
from rows import LOWER, Row


def test_lines_that_were_added_and_removed_count() -> None:
    assert changed_lines(["a", "b", "c"], ["a", "d", "c", "e"]) == 3
    assert changed_lines(["--- a"], []) == 1
    assert changed_lines(["a"], ["a"]) == 0


@pytest.mark.parametrize("layout", pipelines.LAYOUTS)
def test_a_backward_takes_twice_a_forward(layout: str) -> None:
    pipeline = pipelines.pipeline_of(layout, chunks=1)
    assert (pipeline["stages"], pipeline["virtual_stages"]) == pipelines.LAYOUTS[layout]
    for group, (prefix, microbatches) in zip(pipeline["groups"], pipelines.GROUPS, strict=True):
        assert group["prefix_rows"] == prefix
        assert group["backward"]["linear_ns"] == 2 * group["forward"]["linear_ns"]
        assert [each["rows"] for each in group["microbatches"]] == list(microbatches)
        for each in group["microbatches"]:
            assert each["backward_ns"] == 2 * each["forward_ns"]
            assert each["forward_ns"] == each["rows"] * pipelines.FORWARD_NS_PER_ROW


def test_the_time_of_an_op_is_between_its_ends() -> None:
    times = {"ops": [[{"start_ns": 3, "end_ns": 5}], [{"start_ns": 5, "end_ns": 9}]]}
    assert pipelines.op_ns(times) == [[2], [4]]


def test_a_bubble_is_what_the_busiest_stage_waits() -> None:
    assert pipelines.bubble(15, [5, 10]) == pytest.approx(0.5)


def test_a_measured_bubble_begins_with_the_first_stage_and_ends_with_the_last() -> None:
    def rounds(*figures: tuple[float, float, float]) -> list[dict]:
        return [dict(zip(("start", "end", "busy"), each, strict=True)) for each in figures]

    stages = [
        rounds((0, 10, 8), (20, 30, 10), (40, 52, 4)),
        rounds((1, 12, 4), (20, 29, 2), (38, 50, 7)),
    ]
    # 12 / 8, 10 / 10 and 14 / 7.
    assert pipelines.measured_bubble(stages) == pytest.approx(0.5)


def test_the_worst_layout_and_the_farthest_ratio_are_reported() -> None:
    def found(name: str, ratio_max: float, ratio_p99: float, *pairs: tuple[int, int]) -> dict:
        return {
            "name": name,
            "dtype": "float32",
            "worst_parameter": "weight",
            "bytes": pairs,
            "ratio_max": ratio_max,
            "ratio_p99": ratio_p99,
            "ratio_global": 1.0,
            "dense_global": 0.1,
            "within_bounds": ratio_max < 4,
        }

    rows = gradient_rows.empty_rows()
    gradient_rows.fill(rows, [found("one", 3, 1, (10, 10)), found("two", 2, 1.5, (10, 8))])
    assert [row.name for row in rows] == list(gradient_rows.NAMES)
    assert [row.ours for row in rows] == [1.25, 3, 1.5]
    assert [row.met for row in rows] == [False, True, True]
    assert "one, float32" in rows[1].how
    assert "two, float32" in rows[2].how
    rows = gradient_rows.empty_rows()
    gradient_rows.fill(rows, [found("one", 5, 1, (10, 10)), found("two", 2, 1.5, (10, 10))])
    assert [row.ours for row in rows] == [1, None, None]
    assert "one, float32" in rows[1].how


def test_the_largest_peak_over_its_plan_is_reported() -> None:
    def calls(*each: tuple[int, int, int]) -> list[dict]:
        return [dict(zip(("measured", "bytes", "waited_ns"), it, strict=True)) for it in each]

    row = Row(peak_rows.NAME, "ratio", LOWER, "how", bar=peak_rows.BAR)
    first = {"within": calls((8, 10, 10**6), (9, 10, 0)), "free": calls((30, 10, 0))}
    second = {"within": calls((21, 20, 10**7), (10, 20, 0)), "free": calls((20, 20, 10**8))}
    peak_rows.fill(row, [first, second])
    assert row.ours == pytest.approx(1.05) and not row.met
    assert row.peers == {peak_rows.FREE: 3}
    assert "smallest ratio 0.500" in row.how
    assert row.how.endswith("10 ms, with more memory 100 ms")
    first["within"][1]["measured"] = 0
    row = Row(peak_rows.NAME, "ratio", LOWER, "how", bar=2)
    peak_rows.fill(row, [first, second])
    assert row.met is False, "a stage measured nothing"
