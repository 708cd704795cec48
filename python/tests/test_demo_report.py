"""From what workers answer to the report, its bars and its table."""

from __future__ import annotations

import copy
import json

import pytest

from dormouse.demo import report, table

MIB = 1 << 20

FIELDS = {
    "dense_seconds", "shared_seconds", "shared_awake_seconds",
    "dense_cpu_seconds", "shared_cpu_seconds", "shared_awake_cpu_seconds",
    "speedup", "predicted_speedup", "token_ratio", "grad_error", "asleep_equals_awake",
    "phase_b_peak_bytes", "step_peak_bytes", "dormant_bytes", "bytes_slept",
    "stall_seconds", "stall_bound_seconds", "dumps", "setting", "rounds",
}  # fmt: skip


def timed(wall: float, **more) -> dict:
    return {"wall_seconds": wall, "cpu_seconds": 2 * wall, "loss": 0.1, **more}


def prefix(stall_ns: int = 100_000_000) -> dict:
    return {
        "dormant_bytes": 1000 * MIB,
        "asleep_bytes_peak": 960 * MIB,
        "tier_bytes_peak": {"device": 0, "host": 0, "nvme": 1000 * MIB},
        "stall_ns": stall_ns,
        "stall_bound_ns": 20_000_000,
    }


def peak(mib: int) -> dict:
    return {"resident": mib * MIB, "tracked": (mib - 10) * MIB}


def measured() -> report.Measured:
    rounds = [
        {
            "dense": timed(dense),
            "asleep": timed(asleep, prefix=prefix()),
            "awake": timed(asleep - 1.0, prefix=prefix(0)),
        }
        for dense, asleep in ((40.0, 8.0), (44.0, 8.0), (80.0, 20.0))
    ]
    shared = {"digest": "d", "gradient_norm": 0.5, "prefix": prefix()}
    return report.Measured(
        setting={
            "model": "M", "dtype": "float32", "threads": 2, "group": "g",
            "prompt_tokens": 768, "responses": 8, "response_tokens_mean": 48.0,
        },
        prediction={"speedup": 5.2, "token_ratio": 5.6},
        rounds=rounds,
        peaks={
            "dense": {"step_peak": peak(2000)},
            "awake": {"step_peak": peak(2400), "phases": {"B": peak(1800)}, **shared},
            "asleep": {"step_peak": peak(1900), "phases": {"B": peak(900)}, **shared},
        },
        grad_error={
            "shared_global": 6e-6, "dense_global": 6.2e-6, "ratio_global": 0.97,
            "ratio_median": 1.0, "ratio_p99": 1.4, "ratio_max": 3.2,
            "worst_parameter": "p", "within_bounds": True,
        },
        dumps={"perfetto": "target/demo/timeline.pftrace", "picture": "target/demo/timeline.html"},
        groups=[],
    )  # fmt: skip


def verdicts(data: report.Measured) -> dict[str, bool]:
    return {bar.name.split(",")[0]: bar.met for bar in report.bars(report.assemble(data), data)}


def test_fields_and_figures():
    result = report.assemble(measured())
    assert set(result) == FIELDS
    assert result["dense_seconds"] == 44.0
    assert result["shared_seconds"] == 8.0
    assert result["shared_awake_seconds"] == 7.0
    assert result["shared_cpu_seconds"] == 16.0
    # The median of the rounds' own ratios, not the ratio of medians (5.5).
    assert result["speedup"] == 5.0
    assert result["phase_b_peak_bytes"]["dense"] is None
    assert result["phase_b_peak_bytes"]["shared_asleep"] == peak(900)
    assert result["step_peak_bytes"]["dense"] == peak(2000)
    assert set(result["grad_error"]) == set(report.GRAD_ERROR_FIELDS)
    assert result["asleep_equals_awake"] is True
    assert result["bytes_slept"] == {"host": 0, "nvme": 1000 * MIB}
    assert result["stall_seconds"] == pytest.approx(0.1)
    assert result["stall_bound_seconds"] == pytest.approx(0.02)


def test_every_bar_is_met_and_each_can_be_missed():
    assert all(verdicts(measured()).values())

    def slower(data):
        data.prediction["speedup"] = 5.6

    def wrong(data):
        data.grad_error["within_bounds"] = False

    def different(data):
        data.peaks["asleep"]["digest"] = "e"

    def resident(data):
        data.peaks["asleep"]["phases"]["B"]["resident"] = 1000 * MIB

    def tracked(data):
        data.peaks["asleep"]["phases"]["B"]["tracked"] = 1000 * MIB

    def awake(data):
        data.peaks["asleep"]["prefix"]["asleep_bytes_peak"] = 940 * MIB

    def stalled(data):
        for replies in data.rounds:
            replies["asleep"]["prefix"]["stall_ns"] = 900_000_000

    cases = {
        slower: "speedup",
        wrong: "gradients: all",
        different: "asleep equals awake",
        resident: "phase-B peak",
        tracked: "phase-B peak",
        awake: "dormant bytes asleep in B",
        stalled: "stall",
    }
    for spoil, name in cases.items():
        data = copy.deepcopy(measured())
        spoil(data)
        assert [n for n, met in verdicts(data).items() if not met] == [name], spoil.__name__


def test_nothing_dormant_is_a_missed_bar_not_a_crash():
    data = copy.deepcopy(measured())
    data.peaks["asleep"]["prefix"].update(dormant_bytes=0, asleep_bytes_peak=0)
    data.peaks["awake"]["phases"]["B"] = {"resident": 0, "tracked": 0}
    missed = verdicts(data)
    assert not missed["dormant bytes asleep in B"]
    assert not missed["phase-B peak"]
    assert not missed["asleep equals awake"]


@pytest.mark.parametrize("norm", [0.0, float("nan"), float("inf")])
def test_gradients_that_were_not_computed_are_not_equal(norm):
    data = measured()
    for mode in ("asleep", "awake"):
        data.peaks[mode]["gradient_norm"] = norm
    assert report.assemble(data)["asleep_equals_awake"] is False
    assert not verdicts(data)["asleep equals awake"]


@pytest.mark.parametrize("awake", [0, -10])
def test_nothing_is_below_no_peak(awake):
    peaks = {"shared_awake": {"resident": awake}, "shared_asleep": {"resident": -100}}
    assert report.reduction({"phase_b_peak_bytes": peaks}, "resident") is None


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path):
    path = tmp_path / "deep" / "report.json"
    report.write({"a": {"b": float("inf")}, "c": [float("nan"), 1.5]}, path)
    assert json.loads(path.read_text()) == {"a": {"b": None}, "c": [None, 1.5]}


def test_table_shows_every_mode_and_bar():
    data = measured()
    result = report.assemble(data)
    text = table.render(result, report.bars(result, data))
    for word in ("dense", "shared, awake", "shared, asleep", "5.00 ×", "900 MiB", "✓"):
        assert word in text
    assert table.MISSED not in text
    assert max(map(len, text.splitlines())) <= 100
    data.peaks["asleep"]["digest"] = "e"
    result = report.assemble(data)
    assert table.MISSED in table.render(result, report.bars(result, data))


def test_table_shows_every_group_of_a_full_run():
    data = measured()
    data.groups.append(
        {
            "id": "other", "prompt_tokens": 500, "dense_seconds": 30.0, "shared_seconds": 6.0,
            "speedup": 5.0, "predicted_speedup": 4.9,
        }
    )  # fmt: skip
    result = report.assemble(data)
    assert "│ other" in table.render(result, report.bars(result, data))


def test_grid_is_straight():
    lines = table.grid(("a", "bcd"), [("wider", "e"), ("f", "")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "│ a     │ bcd │"
