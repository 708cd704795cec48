"""Utilisation of ours with large pages and without."""

from __future__ import annotations

import pytest
from contenders import EXPANDABLE, NATIVE, OURS, OURS_ALONE, Contender
from memory import RUN_AHEAD, RUN_AHEAD_FAR, TRACE_BAR, busy, over_expandable, with_and_alone
from rows import HIGHER, Row

HELD = {OURS.name: 100, OURS_ALONE.name: 200, NATIVE.name: 400}


def run(one: Contender) -> dict:
    return {"peak_live_bytes": 100, "peak_device_bytes": HELD[one.name]}


@pytest.mark.parametrize("held_alone", [200, 50])
def test_ours_is_judged_by_the_smaller_of_both(held_alone, monkeypatch):
    monkeypatch.setitem(HELD, OURS_ALONE.name, held_alone)
    row = Row("utilisation", "ratio", HIGHER, "")
    assert with_and_alone(row, OURS, run) == min(1.0, 100 / held_alone)
    both = f"1.0000, {100 / held_alone:.4f}"
    assert row.how == f"; ours with large pages and without: {both}, the smaller counts"


def test_others_run_as_they_are():
    row = Row("utilisation", "ratio", HIGHER, "")
    assert with_and_alone(row, NATIVE, run) == 0.25
    assert row.how == ""


def test_a_busy_row_is_judged_near_and_reported_far():
    held = {RUN_AHEAD: 125, RUN_AHEAD_FAR: 200}

    def run_busy(one: Contender, works: int = RUN_AHEAD) -> dict:
        calls = {"cuEventSynchronize": works, "cuMemMap": 7}
        return {"peak_live_bytes": 100, "peak_device_bytes": held[works], "calls": calls, "pairs": 9}

    row = Row("utilisation", "ratio", HIGHER, "")
    assert busy(row, OURS, run_busy) == 0.8
    assert row.how == (
        "; ours with large pages and without: 0.8000, 0.8000, the smaller counts"
        "; ours 1024 works ahead: 0.5000; "
        "waits of ours: 64 and 1024 for 9 blocks"
    )
    row = Row("utilisation", "ratio", HIGHER, "")
    assert busy(row, NATIVE, run_busy) == 0.8
    assert row.how == ""


def test_the_bar_is_over_torch_expandable_and_stays_without_its_figure():
    row = Row("utilisation", "ratio", HIGHER, "", ours=1.0)
    assert over_expandable(row) is None, "a look at ours alone"
    row.put(EXPANDABLE.name, 0.9)
    assert over_expandable(row) == pytest.approx(0.93)
    row.put(EXPANDABLE.name, None)
    assert over_expandable(row, TRACE_BAR) == TRACE_BAR
    row.bar = over_expandable(row)
    assert row.met is False


def test_pages_are_told_to_the_library():
    for variable in ("DORMOUSE_CUDA_PAGE_BYTES", "DORMOUSE_CUDA_LARGE_PAGE_BYTES"):
        assert OURS_ALONE.environment[variable] == "2MiB"
        assert variable not in OURS.environment
    assert OURS_ALONE.budget_variable == OURS.budget_variable
