"""What stages hold is measured, planned and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peaks_worker import BOUNDED_RANK, CASES, PROMPTS
from rank_workers import RANKS, run_ranks

from dormouse import queries
from dormouse.megatron.held import Gathered, planned_lists

WORKER = Path(__file__).with_name("peaks_worker.py")
SECONDS_MAX = 500
EXACT = 1e-10
# The bar of bench-parallel.
PEAK_ERROR_MAX = 0.03
# Of the first stage, with as little as possible in flight, over that in the whole budget.
LEAST_SHARE_MAX = 0.52
# In FP64: K and V of two heads of 64 on a layer, and accumulators.
BOUNDARY_BYTES_PER_LAYER = 2 * 2 * 64 * (8 + 8)
LAYERS_OF_PART = {"two stages": 2, "two stages, awake": 2, "two stages of two chunks": 1}
# Hidden states of a row, and of the longest op: the longest prompt but its last token.
ROW_BYTES = 256 * 8
MESSAGE_BYTES = (max(PROMPTS) - 1) * ROW_BYTES


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank left."""
    directory = tmp_path_factory.mktemp("peaks")
    assert run_ranks(WORKER, directory, seconds_max=SECONDS_MAX) == [0] * RANKS
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_figures_that_can_be_counted_are_the_counted_ones(name, found):
    for own in found:
        held = own[name]["bytes"]
        assert held["boundary"] == BOUNDARY_BYTES_PER_LAYER * LAYERS_OF_PART[name]
        assert held["fixed"] == own[name]["gradient_bytes"] + MESSAGE_BYTES
        assert held["microbatch_saved"] > ROW_BYTES


@pytest.mark.parametrize("name", CASES)
def test_a_peak_is_planned_from_the_second_call_on(name, found):
    for own in found:
        first, second, *_ = own[name]["peaks"]
        assert first["bytes"] == 0
        assert second["bytes"] > own[name]["bytes"]["fixed"]
        # bench-parallel has the ratio of a longer step.
        assert second["bytes"] / 2 < second["measured"] < 2 * second["bytes"]


def test_the_peak_of_equal_batches_is_the_planned_one(found):
    """Where nothing sleeps, so that no copy is in time or late."""
    for own in found:
        _, second, *_ = own["two stages, awake"]["peaks"]
        assert second["measured"] == pytest.approx(second["bytes"], rel=PEAK_ERROR_MAX)


@pytest.mark.parametrize("name", CASES)
def test_a_list_runs_in_as_little_memory_as_it_is_accepted_in(name, found):
    """Allocations wait for what is falling asleep."""
    for own in found:
        _, _, within, *_ = own[name]["peaks"]
        assert within["bytes"] > own[name]["bytes"]["fixed"]
        assert within["measured"] <= within["bytes"] * (1 + PEAK_ERROR_MAX)
        assert own[name]["distance"] < EXACT


@pytest.mark.parametrize("name", CASES)
def test_a_stage_without_room_has_little_in_flight_on_all(name, found):
    for own in found:
        _, second, _, bounded, _ = own[name]["peaks"]
        assert (bounded["live_groups"], bounded["in_flight"]) == (1, 1)
        assert bounded["bytes"] <= second["bytes"]
        assert own[name]["distance"] < EXACT
        assert own[name]["asleep"] == 0


@pytest.mark.parametrize("name", CASES)
def test_the_first_stage_without_room_holds_half(name, found):
    _, second, _, bounded, _ = found[BOUNDED_RANK][name]["peaks"]
    # With the whole budget it may hold what is still falling asleep, too.
    for peak in ("bytes", "measured") if name == "two stages, awake" else ("bytes",):
        assert bounded[peak] <= LEAST_SHARE_MAX * second[peak]


@pytest.mark.parametrize("name", CASES)
def test_a_stage_with_some_room_uses_it(name, found):
    """And no more: neither the whole budget's list nor that of one group and one microbatch."""
    own = found[BOUNDED_RANK][name]
    _, second, _, least, between = own["peaks"]
    assert least["bytes"] < between["bytes"] < second["bytes"]
    assert max(between["bytes"], between["measured"]) <= own["room"]
    for figure in ("live_groups", "in_flight"):
        assert least[figure] <= between[figure] <= second[figure]
    peaks = (least, between, second)
    few, some, many = (each["live_groups"] * each["in_flight"] for each in peaks)
    assert few < some < many
    assert all(each[name]["distance"] < EXACT for each in found)


def pipeline() -> tuple[list[dict], dict]:
    def costs(rows: int) -> dict:
        return {"rows": rows, "forward_ns": rows, "backward_ns": 2 * rows}

    group = {
        "prefix_rows": 100,
        "forward": {"linear_ns": 100},
        "backward": {"linear_ns": 200},
        "microbatches": [costs(10)] * 6,
    }
    options = {"stages": 4, "chunks": 1, "order": "stream"}
    return [group] * 4, options


def test_lists_fit_the_room_of_every_stage():
    groups, options = pipeline()
    own = {"boundary": 10, "microbatch_saved": 100, "fixed": 50}
    figures = [own] * 3 + [own | {"microbatch_saved": 300}]
    free = queries.pipeline(groups, stage_bytes=figures, **options)["stages"]
    assert planned_lists(groups, Gathered(figures, [1 << 40] * 4), **options)["stages"] == free
    most = max(each["peak"]["bytes"] for each in free)
    # Of one prefix and one microbatch on the last stage.
    least = 50 + 100 * 10 + 10 * 300
    for room in (most - 1, (most + least) // 2, least):
        stages = planned_lists(groups, Gathered(figures, [room] * 4), **options)["stages"]
        assert max(each["peak"]["bytes"] for each in stages) <= room


def test_lists_without_figures_are_not_bounded():
    groups, options = pipeline()
    free = queries.pipeline(groups, **options)
    assert planned_lists(groups, Gathered([], [0] * 4), **options) == free


def test_what_cannot_fit_is_as_little_as_possible(caplog):
    groups, options = pipeline()
    figures = [{"boundary": 10, "microbatch_saved": 100, "fixed": 50}] * 4
    stages = planned_lists(groups, Gathered(figures, [0] * 4), **options)["stages"]
    for each in stages:
        assert (each["peak"]["live_groups"], each["peak"]["in_flight"]) == (1, 1)
    assert "needs 2050 bytes with one group and one microbatch in flight" in caplog.text
