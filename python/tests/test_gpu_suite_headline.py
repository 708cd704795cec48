"""The headline's pure parts: choice of cells and sizes, arithmetic, search, bars."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from dormouse import host_memory
from dormouse.demo.process import WorkerError
from dormouse.headline import (
    arithmetic,
    bars,
    cli,
    expected,
    frontier,
    grid,
    machine,
    shapes,
)
from dormouse.headline.time_budget import TimeBudget
from gpu_suite import result, rows

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
    groups, other = tmp_path / "cgroup", tmp_path / "memory"
    job = groups / "job" / "step"
    job.mkdir(parents=True)
    listed = tmp_path / "listed"
    listed.write_text("4:cpu,memory:/\n1:name=systemd:/job\n0::/job/step\n")
    monkeypatch.setattr(host_memory, "_CGROUP", listed)
    files = host_memory._VERSIONS
    versions = {"": (*files[""][:2], groups), "memory": (*files["memory"][:2], other)}
    monkeypatch.setattr(host_memory, "_VERSIONS", versions)
    assert host_memory.free_bytes() == 600 << 10
    (groups / "job" / "memory.max").write_text(f"{550 << 10}\n")
    (groups / "job" / "memory.current").write_text("0\n")
    assert host_memory.free_bytes() == 550 << 10, "of a group around its own"
    other.mkdir()
    (other / "memory.limit_in_bytes").write_text(f"{520 << 10}\n")
    (other / "memory.usage_in_bytes").write_text(f"{10 << 10}\n")
    assert host_memory.free_bytes() == 510 << 10, "of version 1"
    tmp_path = job
    (tmp_path / "memory.current").write_text(f"{500 << 10}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.free_bytes() == 510 << 10
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
    longest, end, is_limit = search._longest("ours", False, 64, 960)
    assert 985 <= longest <= 1000 and is_limit
    details = [json.loads(line)["detail"] for line in capsys.readouterr().out.splitlines()]
    assert details and all(each["prompt"] > 1000 for each in details)
    assert all(each["report"] == ["awake 3 GiB", "cached 1 GiB"] for each in details)
    assert end == f"a prompt of {details[-1]['prompt']}: no room"


@pytest.mark.parametrize("side", ["ours", "dense"])
def test_a_prompt_of_ours_that_is_too_long_is_tried_twice(side, monkeypatch):
    class Refusing:
        """Memory for prompts of 1,000 tokens, and for those up to 1,500 in the step after a refusal."""

        refused = False
        prompts: list[int] = []

        def query(self, side, name, **arguments):
            if name == "take":
                self.prompts = [*self.prompts, arguments["prompt"]]
            if name == "run":
                room = 1500 if self.refused else 1000
                self.refused = self.prompts[-1] > room
                if self.refused:
                    return {"out_of_memory": "no room", "report": []}
            return {"seconds": 1.0}

        def end(self, side):
            pass

    sides = Refusing()
    search = frontier.Frontier(sides, shapes.TINY, TimeBudget(1e6, "tiny"), tiers=0)
    longest, _, is_limit = search._longest(side, False, 64, 960)
    assert is_limit and sides.prompts.count(longest) == (2 if side == "ours" else 1)
    # Once for each length where no time is left for a second step.
    monkeypatch.setattr(search.budget, "left", iter([1e6, -1.0, -1.0]).__next__)
    sides.prompts = []
    longest, _, is_limit = search._longest("ours", False, 64, 2000)
    assert (longest, is_limit, len(sides.prompts)) == (0, False, 1)


class Sides:
    """Memory of both sides for prompts of some tokens. ``broken``: raises from a prompt on;
    ``is_dead``: and then no longer answers."""

    def __init__(self, limits: dict[str, int], broken: dict[str, int], is_dead: bool = False):
        self.limits, self.broken, self.is_dead = limits, broken, is_dead

    def query(self, side, name, **arguments):
        if name == "take":
            self.prompt = arguments["prompt"]
        if name == "room":
            return {"free_bytes": 0}
        if name == "run" and self.prompt >= self.broken.get(side, 1 << 40):
            raise WorkerError("CUDA error: misaligned address")
        if name == "run" and self.prompt > self.limits[side]:
            return {"out_of_memory": "no room", "report": []}
        prefix = {"dormant_bytes": 1000, "boundary_bytes": 10}
        phases = {"B": {"driver_median": 0}}
        return {"seconds": 1e-9, "prefix": prefix, "phases": phases}

    def end(self, side):
        pass

    def died(self, side):
        return self.is_dead


def searched(sides: Sides, capsys, monkeypatch, could=2000, seconds=1e6) -> tuple[bool, dict]:
    search = frontier.Frontier(sides, shapes.TINY, TimeBudget(seconds, "tiny"), tiers=0)
    monkeypatch.setattr(search, "_calibrate", lambda response: (0, could))
    monkeypatch.setattr(search, "_dense_guess", lambda room, response: 640)
    whole = search.run()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [rows.judged(each["row"]) for each in printed if "row" in each]
    return whole, {each["name"]: each for each in rows.latest(found)}


def test_the_limits_of_both_sides_are_compared(capsys, monkeypatch):
    whole, found = searched(Sides({"ours": 3000, "dense": 900}, {}), capsys, monkeypatch)
    assert whole
    assert found["capacity over dense"]["ours"] == pytest.approx(3128 / 1028, rel=0.05)
    assert found["capacity over dense"]["met"]
    assert found["capacity over what the tiers can hold"]["met"]


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("side", ["ours", "dense"])
def test_a_search_that_did_not_end_by_out_of_memory_has_no_bar(side, is_dead, capsys, monkeypatch):
    sides = Sides({"ours": 3000, "dense": 900}, {side: 700}, is_dead)
    whole, found = searched(sides, capsys, monkeypatch)
    assert not whole
    bar = found["capacity over dense"]
    assert (bar["ours"], bar["bar"], bar["met"]) == (None, frontier.OVER_DENSE_MIN, False)
    assert bar["how"] == f"no figure: the search of {side} did not end by out of memory"


def test_a_search_without_time_has_no_bar(capsys, monkeypatch):
    sides = Sides({"ours": 3000, "dense": 900}, {})
    whole, found = searched(sides, capsys, monkeypatch, seconds=-1)
    assert not whole
    assert found["capacity over dense"]["met"] is False
    assert found["capacity over what the tiers can hold"]["met"] is False


def test_a_search_that_time_ends_above_the_limit_has_none():
    class Clock(TimeBudget):
        """Time for three prompts."""

        prompts = 3

        def left(self):
            self.prompts -= 1
            return 1e6 if self.prompts >= 0 else -1

    sides = Sides({"dense": 900}, {})
    search = frontier.Frontier(sides, shapes.TINY, Clock(1e6, "tiny"), tiers=0)
    longest, end, is_limit = search._longest("dense", False, 64, 960)
    assert longest < 900 and end is not None
    assert not is_limit


def test_tiers_that_hold_no_prompt_meet_no_bar(capsys, monkeypatch):
    sides = Sides({"ours": 3000, "dense": 900}, {})
    _, found = searched(sides, capsys, monkeypatch, could=0)
    bar = found["capacity over what the tiers can hold"]
    assert (bar["ours"], bar["met"]) == (None, False)


def test_ours_without_a_limit_to_search_from_fails(monkeypatch):
    broken = Sides({"ours": 3000}, {"ours": 0})
    monkeypatch.setattr(cli, "_no_device", lambda device: None)
    monkeypatch.setattr(cli, "_pair", lambda options, geometry: contextlib.nullcontext(broken))
    with pytest.raises(WorkerError, match="misaligned"):
        cli.main(["frontier", "--tiny", "--host-bytes", "1"])


def test_a_host_tier_beyond_what_is_free_cannot_run(capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 100)
    monkeypatch.setitem(cli.COMMANDS, "grid", lambda options, geometry: 0)
    assert cli.main(["grid", "--tiny", "--host-bytes", "90"]) == 0
    assert cli.main(["grid", "--tiny", "--host-bytes", "91"]) == result.UNABLE
    assert "91: 100 are free; accepted: at most 90" in json.loads(capsys.readouterr().out)["cannot_run"]


def measured(**changes) -> bars.Measured:
    def reply(seconds, peak, middle):
        phases = {"A": {"driver_peak": 5}, "B": {"driver_peak": peak, "driver_median": middle}}
        for figures in phases.values():
            figures["allocator_peak"] = None
        prefix = {
            "dormant_bytes": 100,
            "asleep_at_b_bytes": 99,
            "asleep_bytes_peak": 100,
            "stall_ns": 5,
            "stall_bound_ns": 2,
        }
        attention = {
            "calls": "causal",
            "kernel": "cudnn",
            "seconds": {"flash 2": 2e-3, "cudnn": 1.25e-3},
            "refused": {"flash 4": "TypeError"},
        }
        reply = {"seconds": seconds, "loss": 0.25, "phases": phases, "prefix": prefix}
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


def test_ours_without_memory_misses_every_bar():
    found = figures(measured(asleep={"out_of_memory": "no room"}))
    bars_of = ("whole-step peak below awake", "dormant bytes given back during B")
    for name in ("speedup, dense ÷ asleep", "sleeping costs", *bars_of):
        assert (found[name]["ours"], found[name]["met"]) == (None, False), name
        assert "out of memory: no room" in found[name]["how"]
    found = figures(measured(dense={"out_of_memory": "no room"}))
    assert found["speedup, dense ÷ asleep"]["met"] is False
    assert found["speedup, dense ÷ asleep"]["how"] == "no figure: dense: out of memory: no room"


def test_a_cell_that_ours_never_ran_is_not_measured(capsys):
    class Full:
        info = {"ours": {"parameter_bytes": 1, "total_bytes": None}}

        def query(self, side, name, **arguments):
            return {"out_of_memory": "no room"} if name == "run" else {}

    cells = [shapes.Cell("10k/2k", 2, "eager")]
    assert not grid.Grid(Full(), shapes.TINY, TimeBudget(1e6, "tiny")).run(cells)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = {each["row"]["name"].partition(": ")[2] for each in printed if "row" in each}
    assert "speedup, dense ÷ asleep" in names


@pytest.mark.parametrize(
    ("dense", "asleep", "has_figure"),
    [
        (0.25, 0.26, True),
        (-0.25, -0.26, True),
        (0.25, 0.27, False),
        (0.25, -0.25, False),
        (0.25, math.nan, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (0.25, None, False),
    ],
)
def test_a_speedup_has_a_figure_where_losses_are_near(dense, asleep, has_figure):
    found = measured()
    found.rounds[0]["dense"] |= {"loss": dense}
    found.rounds[0]["asleep"] |= {"loss": asleep}
    speedup = figures(found)["speedup, dense ÷ asleep"]
    assert (speedup["ours"] is not None) is has_figure
    assert speedup["met"] is has_figure
    assert has_figure or speedup["how"].startswith("no figure: losses dense ")
    del found.rounds[0]["asleep"]["loss"]
    assert figures(found)["speedup, dense ÷ asleep"]["ours"] is None


def test_sleeping_costs_nothing_to_say_where_nothing_slept():
    found = measured()
    found.rounds[0]["asleep"]["seconds"] = 2.0
    assert figures(found)["sleeping costs"]["met"]
    found.rounds[0]["asleep"]["prefix"]["asleep_bytes_peak"] = 0
    costs = figures(found)["sleeping costs"]
    assert (costs["ours"], costs["met"]) == (None, False)
    assert costs["how"] == "no figure: nothing slept"
    del found.rounds[0]["asleep"]["prefix"]["asleep_bytes_peak"]
    assert figures(found)["sleeping costs"]["ours"] is None


@pytest.mark.parametrize("awake", [0, -100, None])
def test_nothing_is_below_no_peak(awake):
    assert bars._below(-200, awake) is None


def test_gradients_that_say_nothing_are_not_equal():
    from dormouse.headline.small import Digests, exactness

    def ours(digests, awake_norm=1.0, slept_bytes=1):
        asleep = Digests(digests, 1.0, slept_bytes)
        return exactness(asleep, Digests({"a": "1", "b": "2"}, awake_norm, 0))["ours"]

    same = {"a": "1", "b": "2"}
    assert ours(same) == 0
    assert ours({"a": "1", "b": "3"}) == 1
    assert ours({"a": "1"}) == 1
    assert ours(same | {"c": "4"}) == 1
    assert ours(same, slept_bytes=0) is None
    assert all(ours(same, norm) is None for norm in (0.0, math.nan, math.inf))
    nothing = Digests({}, 0.0, 1)
    assert exactness(nothing, nothing)["ours"] is None


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
