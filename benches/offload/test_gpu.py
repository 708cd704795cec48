"""Rows of a simulated step: what becomes of the figures, and the tables that it charges."""

from __future__ import annotations

from pathlib import Path

import gpu_rows
import pytest
from dormouse.headline import arithmetic
from dormouse.headline.shapes import HEADLINE, LLAMA3_8B
from gpu_rows import (
    BEHIND_AWAKE,
    BUT_LAST,
    COSTS,
    FREE,
    GIVEN_BACK,
    LARGE_MIB,
    LARGE_MIB_DEFAULT,
    PHASES,
    PUBLISHED,
    RUN_AHEAD_BAR,
    RUN_AHEAD_LAYERS,
    fill,
    fill_b_mapped,
    fill_c_peak,
    fill_run_ahead,
)
from ours import TARGET

# `make test` builds it and the stand-in driver beside it.
BUILT = TARGET / "debug"
DRIVER = BUILT / "examples" / "gpu_step"


def a_step(step_ns: int) -> dict:
    return {"step_ns": step_ns, "calls_ns": 500_000_000, "waits_ns": 250_000_000}


def test_the_overhead_is_over_the_step_whose_calls_are_free():
    steps = {large_mib: a_step(1000 + large_mib) for large_mib in LARGE_MIB}
    row = fill("overhead", COSTS, a_step(1000), steps)
    assert row.name == "overhead"
    assert row.ours == LARGE_MIB_DEFAULT / 1000
    others = [large_mib for large_mib in LARGE_MIB if large_mib != LARGE_MIB_DEFAULT]
    assert row.peers == {f"{large_mib} MiB": large_mib / 1000 for large_mib in others}
    for words in ("0.50 s in calls", "for 0.25 s beside", f"costs of {COSTS.name} on"):
        assert words in row.how


def test_the_overhead_of_published_costs_has_a_row_of_its_own(monkeypatch, tmp_path):
    def a_step_of(large_mib: int, costs: Path) -> dict:
        return a_step(1000 + {FREE: 0, COSTS: 1, PUBLISHED: 21}[costs])

    monkeypatch.setattr(gpu_rows, "DRIVER", tmp_path)
    monkeypatch.setattr(gpu_rows, "step", a_step_of)
    measured, published = gpu_rows.overheads()
    assert (measured.ours, measured.met) == (0.001, True)
    assert (published.ours, published.met) == (0.021, False)
    assert (measured.name, published.name) == ("gpu_sleep_wake_overhead", gpu_rows.PUBLISHED_ROW)


def test_the_bar_is_two_percent():
    steps = dict.fromkeys(LARGE_MIB, a_step(1021))
    assert fill("overhead", COSTS, a_step(1000), steps).met is False
    steps = dict.fromkeys(LARGE_MIB, a_step(1020))
    assert fill("overhead", COSTS, a_step(1000), steps).met is True


def test_calls_that_cost_nothing_have_no_overhead_that_counts():
    steps = dict.fromkeys(LARGE_MIB, a_step(1000) | {"calls_ns": 0})
    row = fill("overhead", COSTS, a_step(1000), steps)
    assert (row.ours, row.met) == (None, False)


def peaks(b_bytes: int, c_bytes: int) -> dict:
    mapped = {"b_bytes": b_bytes, "before_last_bytes": b_bytes // 2, "c_bytes": c_bytes}
    return a_step(1000) | mapped


def test_the_peak_of_c_is_over_that_of_b():
    steps = {large_mib: peaks(100, 100 + large_mib) for large_mib in LARGE_MIB}
    row = fill_c_peak(steps, peaks(100, 130), peaks(100, 140))
    assert row.ours == (100 + LARGE_MIB_DEFAULT) / 100
    others = [large_mib for large_mib in LARGE_MIB if large_mib != LARGE_MIB_DEFAULT]
    sizes = {f"{large_mib} MiB": (100 + large_mib) / 100 for large_mib in others}
    assert row.peers == {**sizes, BEHIND_AWAKE: 1.3, BUT_LAST: 2.8}
    # The bar is on the plain figure.
    for c_bytes, is_met in ((110, True), (111, False)):
        steps = dict.fromkeys(LARGE_MIB, peaks(100, c_bytes))
        assert fill_c_peak(steps, peaks(100, 130), peaks(100, 140)).met is is_met


def test_what_is_mapped_in_b_is_over_what_is_in_use():
    def middle(mapped_bytes: int) -> dict:
        return a_step(1000) | {"middle_bytes": mapped_bytes, "middle_in_use_bytes": 100}

    row = fill_b_mapped({large_mib: middle(100 + large_mib) for large_mib in LARGE_MIB})
    assert row.ours == (100 + LARGE_MIB_DEFAULT) / 100
    for mapped_bytes, is_met in ((103, True), (104, False)):
        assert fill_b_mapped(dict.fromkeys(LARGE_MIB, middle(mapped_bytes))).met is is_met


def phases(**bytes_mapped: int) -> dict:
    mapped = {f"{phase}_bytes": 4 * RUN_AHEAD_BAR for phase in PHASES}
    return a_step(1000) | mapped | {f"{phase}_bytes": it for phase, it in bytes_mapped.items()}


def test_a_run_ahead_adds_up_to_a_gibibyte_in_any_phase():
    equal = phases(), phases()
    assert fill_run_ahead(*equal, *equal).ours == 0
    # Each phase grows below the most of the step.
    for phase in PHASES:
        beside = phases(**{phase: RUN_AHEAD_BAR})
        for added, is_met in ((RUN_AHEAD_BAR, True), (RUN_AHEAD_BAR + 1, False)):
            grown = beside, phases(**{phase: RUN_AHEAD_BAR + added})
            row = fill_run_ahead(*grown, *equal)
            assert (row.ours, row.met, row.peers) == (added, is_met, {GIVEN_BACK: 0})
            # The bar is on steps whose pages stay.
            row = fill_run_ahead(*equal, *grown)
            assert (row.ours, row.met, row.peers) == (0, True, {GIVEN_BACK: added})
    assert "Beyond the plan is taken as beyond the run whose host waits for each work" in row.how


def test_what_was_not_mapped_meets_no_bar():
    def in_all(step: dict) -> dict[int, dict]:
        return dict.fromkeys(LARGE_MIB, step)

    middle = {"middle_bytes": 0, "middle_in_use_bytes": 100}
    nothing = phases(**dict.fromkeys(PHASES, 0))
    for row in (
        fill_c_peak(in_all(peaks(100, 0)), peaks(100, 0), peaks(100, 0)),
        fill_b_mapped(in_all(a_step(1000) | middle)),
        fill_run_ahead(*[nothing] * 4),
    ):
        assert (row.ours, row.met) == (None, False)


def costs(path) -> dict[str, list[int]]:
    stripped = (line.split("#")[0].split() for line in path.read_text().splitlines())
    return {line[0]: [int(each) for each in line[1:]] for line in stripped if line}


def test_the_published_table_costs_more_in_every_call():
    measured, published = costs(COSTS), costs(PUBLISHED)
    assert costs(FREE) == {}
    assert published.keys() - measured.keys() == {"map_after_release", "unmap_waits_for_kernels"}
    for name, (per_handle_ns, _) in measured.items():
        assert published[name][0] > per_handle_ns


def test_the_driver_s_failure_is_a_reason(monkeypatch):
    monkeypatch.setattr(gpu_rows, "DRIVER", "/bin/false")
    try:
        gpu_rows.step(2, FREE)
    except gpu_rows.Unavailable as reason:
        assert "false 2 48 0 0" in str(reason)
    else:
        raise AssertionError("a failure went unseen")


@pytest.fixture(scope="module")
def simulated() -> dict[Path, dict]:
    """A step whose calls cost time, and the same one whose calls are free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DORMOUSE_TEST_LIBS", str(BUILT))
        numbers = (LARGE_MIB_DEFAULT, RUN_AHEAD_LAYERS, 0, 0)
        return {costs: gpu_rows.run(DRIVER, costs, numbers) for costs in (COSTS, FREE)}


def test_calls_of_a_simulated_step_cost_what_the_table_says(simulated):
    assert simulated[FREE]["calls_ns"] == 0 < simulated[COSTS]["calls_ns"]
    assert simulated[FREE]["step_ns"] <= simulated[COSTS]["step_ns"]


def test_a_microbatch_of_a_simulated_step_uses_what_the_arithmetic_says(simulated):
    expected = arithmetic.peaks(LLAMA3_8B, HEADLINE[0]).asleep_in_b
    for one in simulated.values():
        assert one["middle_in_use_bytes"] == pytest.approx(expected, rel=0.001)


def test_peaks_of_a_simulated_step_are_in_order(simulated):
    dormant = arithmetic.peaks(LLAMA3_8B, HEADLINE[0]).dormant
    for one in simulated.values():
        assert 0 < one["middle_in_use_bytes"] <= one["middle_bytes"] <= one["before_last_bytes"]
        assert one["b_bytes"] == max(one["before_last_bytes"], one["last_microbatch_bytes"])
        # What was dormant is mapped in A and C, and leaves in between.
        assert one["middle_bytes"] < dormant < min(one["a_bytes"], one["c_bytes"])


def test_the_last_microbatch_of_a_simulated_step_begins_with_waking(simulated):
    # Above parameters and gradients, which are in use too.
    held_bytes = 2 * arithmetic.BF16_BYTES * arithmetic.parameters(LLAMA3_8B)
    for one in simulated.values():
        # What wakes has room beside what a microbatch takes, and leaves a sixteenth of the most in use.
        both_bytes = one["woken_beside_bytes"] + one["middle_in_use_bytes"]
        assert one["middle_in_use_bytes"] < both_bytes <= one["last_microbatch_bytes"]
        assert both_bytes + held_bytes <= (one["before_last_bytes"] + held_bytes) * 15 / 16
