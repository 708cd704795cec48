"""Utilisation of ours at two sizes of pages."""

from __future__ import annotations

from contenders import NATIVE, OURS, OURS_2_MIB, OURS_16_MIB, Contender
from memory import RUN_AHEAD, RUN_AHEAD_FAR, at_both_pages, busy
from rows import HIGHER, Row

HELD = {OURS_2_MIB.name: 100, OURS_16_MIB.name: 200, NATIVE.name: 400}


def run(one: Contender) -> dict:
    return {"peak_live_bytes": 100, "peak_device_bytes": HELD[one.name]}


def test_ours_is_judged_at_2_mib_and_reported_at_16():
    row = Row("utilisation", "ratio", HIGHER, "")
    assert at_both_pages(row, OURS, run) == 1.0
    assert row.how == "; ours with pages of 16 MiB: 0.5000"


def test_others_run_as_they_are():
    row = Row("utilisation", "ratio", HIGHER, "")
    assert at_both_pages(row, NATIVE, run) == 0.25
    assert row.how == ""


def test_a_busy_row_is_judged_near_and_reported_far():
    held = {RUN_AHEAD: 125, RUN_AHEAD_FAR: 200}

    def run_busy(one: Contender, works: int = RUN_AHEAD) -> dict:
        calls = {"cuEventSynchronize": works, "cuMemMap": 7}
        return {"peak_live_bytes": 100, "peak_device_bytes": held[works], "calls": calls, "pairs": 9}

    row = Row("utilisation", "ratio", HIGHER, "")
    assert busy(row, OURS, run_busy) == 0.8
    assert row.how == "; ours 1024 works ahead: 0.5000; waits of ours: 64 and 1024 for 9 blocks"
    row = Row("utilisation", "ratio", HIGHER, "")
    assert busy(row, NATIVE, run_busy) == 0.8
    assert row.how == ""


def test_pages_are_told_to_the_library():
    for one, size in ((OURS_2_MIB, "2MiB"), (OURS_16_MIB, "16MiB")):
        assert one.environment["DORMOUSE_CUDA_PAGE_BYTES"] == size
        assert one.budget_variable == OURS.budget_variable
