"""The headline's pure parts: choice of cells and sizes, arithmetic, search, bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_suite import rows  # noqa: E402

from dormouse import host_memory  # noqa: E402
from dormouse.headline import (  # noqa: E402
    arithmetic,
    bars,
    expected,
    frontier,
    machine,
    shapes,
)
from dormouse.headline.time_budget import TimeBudget  # noqa: E402

MODEL, CELL = shapes.LLAMA3_8B, shapes.HEADLINE[0]


def test_help_needs_neither_a_gpu_nor_the_library():
    done = subprocess.run(
        [sys.executable, "-m", "dormouse.headline", "--help"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "DORMOUSE_LIB": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "frontier" in done.stdout and "--nvme-dir" in done.stdout


def test_the_headline_comes_first_and_choosing_keeps_what_was_asked():
    cells = shapes.by_importance()
    assert [str(cell) for cell in cells[:2]] == ["10k/2k N=32 eager", "10k/2k N=32 compiled"]
    assert len(cells) == len(set(cells)) == 32
    assert shapes.choose(["10k/2k:32:eager"]) == cells[:1]
    assert len(shapes.choose(["6k/6k", "6k/6k:2"])) == 8
    with pytest.raises(ValueError, match="'10k/2k:3' matches no cell; accepted"):
        shapes.choose(["10k/2k:3"])


def test_layers_are_chosen_by_the_memory_that_is_there():
    much = 1 << 40
    assert arithmetic.layers_that_fit(MODEL, CELL, 143_771 << 20, much) == 32
    assert arithmetic.layers_that_fit(MODEL, CELL, 1 << 30, much) == 0
    dormant = arithmetic.peaks(replace(MODEL, layers=10), CELL).dormant
    assert arithmetic.layers_that_fit(MODEL, CELL, much, dormant) == 10


@pytest.mark.parametrize("cell", [CELL, shapes.Cell("2k/10k", 32, "eager")])
@pytest.mark.parametrize("gpu_gib", range(40, 140, 3))
def test_both_sides_fit_and_a_layer_more_does_not(cell, gpu_gib):
    def needs(layers):
        model = replace(MODEL, layers=layers)
        weights = arithmetic.BF16_BYTES * arithmetic.parameters(model)
        peaks = arithmetic.peaks(model, cell)
        sides = (2 * weights + 1.04 * peaks.awake, 3 * weights + 1.04 * peaks.dense)
        return max(sides) + 2 * 1.2e9

    layers = arithmetic.layers_that_fit(MODEL, cell, gpu_gib << 30, 1 << 40)
    assert needs(layers) <= gpu_gib << 30
    assert layers == MODEL.layers or gpu_gib << 30 < needs(layers + 1)


def test_free_host_memory_is_the_least_of_the_system_and_the_group(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "_GROUPS", (("memory.max", "memory.current", tmp_path),))
    assert host_memory.free_bytes() == 600 << 10
    (tmp_path / "memory.current").write_text(f"{500 << 10}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.free_bytes() == 600 << 10
    (tmp_path / "memory.max").write_text(f"{800 << 10}\n")
    assert host_memory.free_bytes() == 300 << 10
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 10}\n")
    assert host_memory.free_bytes() == 400 << 10
    assert machine.host_budget_bytes() == int(machine.HOST_SHARE * (400 << 10))


def test_the_geometry_has_the_published_number_of_parameters():
    assert arithmetic.parameters(shapes.LLAMA3_8B) == 8_030_261_248


def test_one_response_costs_as_much_shared_as_dense():
    work = arithmetic.work(shapes.LLAMA3_8B, 1000, 100, 1)
    assert work.ours.total == pytest.approx(work.dense.total, rel=1e-4)


@pytest.mark.parametrize("limit", [7, 64, 640, 1000, 5000])
@pytest.mark.parametrize("guess", [10, 900, 4000])
def test_a_search_ends_on_both_sides_of_the_limit(limit, guess):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    low, high = frontier.search(fits, guess, 10)
    assert low <= limit < high
    assert high - low <= 10
    assert len(tried) == len(set(tried)) <= 24


def test_a_search_that_is_stopped_tells_what_it_knows():
    def fits(length):
        if length > 2000:
            raise frontier.Stopped
        return True

    low, high = frontier.search(fits, 1000, 10)
    assert 1000 <= low <= 2000
    assert high is None


def test_a_prompt_that_is_too_long_is_told_with_the_allocators_report(capsys):
    class Side:
        """Memory for prompts of 1,000 tokens."""

        def query(self, side, name, **arguments):
            if name == "take":
                self.prompt = arguments["prompt"]
            if name == "run" and self.prompt > 1000:
                return {"out_of_memory": "no room", "report": ["awake 3 GiB", "cached 1 GiB"]}
            return {"seconds": 1.0}

        def end(self, side):
            pass

    search = frontier.Frontier(Side(), shapes.TINY, TimeBudget(1e6, "tiny"), tiers=0)
    longest, end = search._longest("ours", False, 64, 960)
    assert 985 <= longest <= 1000
    details = [json.loads(line)["detail"] for line in capsys.readouterr().out.splitlines()]
    assert details and all(each["prompt"] > 1000 for each in details)
    assert all(each["report"] == ["awake 3 GiB", "cached 1 GiB"] for each in details)
    assert end == f"a prompt of {details[-1]['prompt']}: no room"


def measured(**changes) -> bars.Measured:
    def reply(seconds, peak, middle):
        phases = {"A": {"driver_peak": 5}, "B": {"driver_peak": peak, "driver_median": middle}}
        for figures in phases.values():
            figures["allocator_peak"] = None
        prefix = {
            "dormant_bytes": 100,
            "asleep_at_b_bytes": 99,
            "stall_ns": 5,
            "stall_bound_ns": 2,
        }
        attention = {
            "calls": "causal",
            "kernel": "cudnn",
            "seconds": {"flash 2": 2e-3, "cudnn": 1.25e-3},
            "refused": {"flash 4": "TypeError"},
        }
        reply = {"seconds": seconds, "phases": phases, "prefix": prefix}
        reply["phase_seconds"] = {"A": seconds / 10, "B": seconds * 0.9}
        return reply | {"attention": [attention, attention | {"calls": "pieces", "seconds": {}}]}

    sides = {
        "dense": reply(9.0, 150, 150),
        "awake": reply(2.0, 200, 180),
        "asleep": reply(2.1, 90, 81),
    }
    return bars.Measured(shapes.HEADLINE[0], sides | changes, [sides | changes])


def figures(found: bars.Measured) -> dict:
    made = bars.rows_of(found, shapes.LLAMA3_8B)
    return {each["name"].partition(": ")[2]: rows.judged(each) for each in made}


def test_a_cell_is_held_to_its_bars():
    found = figures(measured())
    assert found["speedup, dense ÷ asleep"]["ours"] == pytest.approx(9.0 / 2.1, abs=1e-6)
    assert found["speedup, dense ÷ asleep"]["met"]
    assert found["sleeping costs"]["ours"] == pytest.approx(5.0)
    assert found["sleeping costs"]["met"] is False
    assert found["phase B"]["ours"] == pytest.approx(1.89)
    assert found["phase B"]["peers"]["awake"] == pytest.approx(1.8)
    assert found["dormant bytes given back during B"]["ours"] == pytest.approx(99.0)
    assert found["whole-step peak below awake"]["ours"] == pytest.approx(55.0)
    assert found["whole-step peak below awake"]["peers"]["below dense"] == pytest.approx(40.0)
    assert found["phase-B peak below awake"]["met"] is None
    assert found["step"]["how"].endswith(
        "attention by cudnn (causal: flash 2 2.00 ms, cudnn 1.25 ms), cudnn (pieces: none measured)"
    )


def test_a_side_without_memory_leaves_its_figures_open():
    found = figures(measured(awake={"out_of_memory": "no room"}))
    assert found["sleeping costs"]["met"] is False
    assert found["whole-step peak below awake"]["ours"] is None
    assert found["speedup, dense ÷ asleep"]["met"]


def test_a_budget_that_meets_the_bar_of_the_peak_says_what_it_costs():
    found = measured()
    # 100 of parameters and gradients, and 53 % of the 200 that the awake step takes.
    assert bars.limit_bytes(found, 50) == 206
    assert "the budget costs" not in figures(found)
    found.peaks["limited"] = {"phases": {"B": {"driver_peak": 106}}}
    found.limited = {"seconds": 2.31}
    assert figures(found)["whole-step peak below awake, under a budget"]["ours"] == 47.0
    assert figures(found)["the budget costs"]["ours"] == pytest.approx(10.0)
    found.peaks["limited"] = {"out_of_memory": "no room"}
    assert figures(found)["whole-step peak below awake, under a budget"]["ours"] is None
    found.peaks["awake"] = {"out_of_memory": "no room"}
    assert bars.limit_bytes(found, 50) is None


def test_both_sides_with_one_kernel_gain_what_they_save():
    work = expected.work_of(MODEL, CELL)
    slow, fast = (
        expected.seconds(work.ours, kernel) for kernel in (expected.FLASH, expected.CUDNN)
    )
    attention = work.ours.attention
    rates = expected.ATTENTION_FLOPS
    assert slow - fast == pytest.approx(attention / rates["flash"] - attention / rates["cudnn"])
    by_kernels = {sides: expected.speedup(MODEL, CELL, *sides) for sides in expected.SIDES}
    assert (
        by_kernels["cudnn", "flash"] < by_kernels["flash", "flash"] < by_kernels["cudnn", "cudnn"]
    )
    assert by_kernels["cudnn", "cudnn"] < work.dense.total / work.ours.total


def test_calls_are_per_handle_and_pages_waste_ends_of_tensors():
    small, large = (expected.mapping(1 << 30, page_mib) for page_mib in (2, 64))
    assert (small.handles, large.handles) == (512, 16)
    assert small.sleep_s == pytest.approx(512 * 57e-6)
    assert large.wake_s == pytest.approx(16 * (29 + 2 + 35.3 + 64 * 1.33) * 1e-6)
    assert expected.waste_share(2, [2 << 20, 4 << 20]) == 0.0
    assert expected.waste_share(4, [2 << 20, 4 << 20]) == pytest.approx(1 / 3)
    saved = expected.saved_tensor_bytes(MODEL, 1)
    assert sum(saved) == arithmetic.saved_bytes_per_token(MODEL)


def test_waiting_lowers_the_peak_by_what_the_link_moves():
    awake = arithmetic.peaks(MODEL, CELL).awake
    found = expected.whole_step(MODEL, CELL, expected.CUDNN, 45.0)
    assert found.left_bytes + found.peak_bytes == pytest.approx(awake)
    assert found.peak_bytes - found.wait_s * expected.LINK_BYTES_PER_S == pytest.approx(
        0.55 * awake
    )
    easy = expected.whole_step(MODEL, CELL, expected.CUDNN, found.cut_percent - 1)
    assert easy.wait_s == 0.0
    assert expected.whole_step(MODEL, CELL, expected.CUDNN, 45.0, 2048).wait_s < found.wait_s


def test_tiers_lengthen_ours_alone():
    gpu = 78 << 30
    one, other = (expected.longest_tokens(MODEL, gpu, tiers) for tiers in (0, 100 << 30))
    assert one[1] == other[1]
    per_token = 31 * arithmetic.saved_bytes_per_token(MODEL) + arithmetic.boundary_bytes_per_token(
        MODEL
    )
    assert other[0] - one[0] == pytest.approx((100 << 30) / per_token, abs=1)
