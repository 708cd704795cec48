"""``target/demo/report.json``: all measurements, and the bars they are compared with.

docs/demo.md defines each number.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from . import gradcheck

SPEEDUP_OF_PREDICTED_MIN = 0.9
PHASE_B_REDUCTION_MIN = 0.45
ASLEEP_OF_DORMANT_MIN = 0.95
STALL_OF_STEP_MAX = 0.10

# Names of the modes in report.json.
MODE_NAMES = {"dense": "dense", "awake": "shared_awake", "asleep": "shared_asleep"}

GRAD_ERROR_FIELDS = (
    "shared_global",
    "dense_global",
    "ratio_global",
    "ratio_median",
    "ratio_p99",
    "ratio_max",
)


@dataclass(frozen=True)
class Measured:
    """All measurements of a run.

    ``rounds``: per timed round the workers' replies by mode. ``peaks``: one reply per mode, from
    fresh processes. ``grad_error``: :class:`gradcheck.GradError` as a dict. ``groups``: further
    groups' times, if every group was asked for.
    """

    setting: dict
    prediction: dict
    rounds: list[dict[str, dict]]
    peaks: dict[str, dict]
    grad_error: dict
    dumps: dict[str, str]
    groups: list[dict]


@dataclass(frozen=True)
class Bar:
    """One bar."""

    name: str
    met: bool
    value: str
    accepted: str
    correctness: bool
    """Correctness bars fail the demo. Performance bars may be missed on a busy machine."""


def assemble(measured: Measured) -> dict:
    """Returns the fields of the report."""
    rounds = measured.rounds
    asleep_runs = [r["asleep"] for r in rounds]
    ratios = [r["dense"]["wall_seconds"] / r["asleep"]["wall_seconds"] for r in rounds]
    sleeper = measured.peaks["asleep"]
    return {
        "dense_seconds": _median(rounds, "dense", "wall_seconds"),
        "shared_seconds": _median(rounds, "asleep", "wall_seconds"),
        "shared_awake_seconds": _median(rounds, "awake", "wall_seconds"),
        "dense_cpu_seconds": _median(rounds, "dense", "cpu_seconds"),
        "shared_cpu_seconds": _median(rounds, "asleep", "cpu_seconds"),
        "shared_awake_cpu_seconds": _median(rounds, "awake", "cpu_seconds"),
        "speedup": median(ratios),
        "predicted_speedup": measured.prediction["speedup"],
        "token_ratio": measured.prediction["token_ratio"],
        "grad_error": {name: measured.grad_error[name] for name in GRAD_ERROR_FIELDS},
        "asleep_equals_awake": _exactness(measured) == "equal",
        "phase_b_peak_bytes": {
            name: None if mode == "dense" else measured.peaks[mode]["phases"]["B"]
            for mode, name in MODE_NAMES.items()
        },
        "step_peak_bytes": {
            name: measured.peaks[mode]["step_peak"] for mode, name in MODE_NAMES.items()
        },
        "dormant_bytes": sleeper["prefix"]["dormant_bytes"],
        "bytes_slept": {
            tier: count
            for tier, count in sleeper["prefix"]["tier_bytes_peak"].items()
            if tier != "device"
        },
        "stall_seconds": median(r["prefix"]["stall_ns"] for r in asleep_runs) / 1e9,
        "stall_bound_seconds": median(r["prefix"]["stall_bound_ns"] for r in asleep_runs) / 1e9,
        "dumps": measured.dumps,
        "setting": measured.setting,
        "rounds": [
            {MODE_NAMES[mode]: reply["wall_seconds"] for mode, reply in r.items()} for r in rounds
        ],
        **({"groups": measured.groups} if measured.groups else {}),
    }


def bars(report: dict, measured: Measured) -> list[Bar]:
    """Returns the bars, correctness first."""
    error = measured.grad_error
    prefix = measured.peaks["asleep"]["prefix"]
    speedup_min = SPEEDUP_OF_PREDICTED_MIN * report["predicted_speedup"]
    stall_share = report["stall_seconds"] / report["shared_seconds"]
    asleep_share = _share(prefix["asleep_bytes_peak"], prefix["dormant_bytes"])
    cut = {account: reduction(report, account) for account in ("resident", "tracked")}
    return [
        Bar(
            "gradients: all, median, p99, max",
            error["within_bounds"],
            " ".join(
                f"{error[f'ratio_{name}']:.2f}" for name in ("global", "median", "p99", "max")
            ),
            f"at most {gradcheck.RATIO_GLOBAL_MAX:.2f} {gradcheck.RATIO_MEDIAN_MAX:.2f} "
            f"{gradcheck.RATIO_P99_MAX:.2f} {gradcheck.RATIO_MAX_MAX:.2f}",
            correctness=True,
        ),
        Bar(
            "asleep equals awake, bit for bit",
            report["asleep_equals_awake"],
            _exactness(measured),
            "equal",
            correctness=True,
        ),
        Bar(
            f"speedup, {SPEEDUP_OF_PREDICTED_MIN} of predicted",
            report["speedup"] >= speedup_min,
            f"{report['speedup']:.2f} ×",
            f"at least {speedup_min:.2f} ×",
            correctness=False,
        ),
        Bar(
            "phase-B peak, asleep below awake",
            all(share is not None and share >= PHASE_B_REDUCTION_MIN for share in cut.values()),
            ", ".join(
                f"{account} {'no figure' if share is None else f'-{share:.0%}'}"
                for account, share in cut.items()
            ),
            f"at least -{PHASE_B_REDUCTION_MIN:.0%}, both",
            correctness=False,
        ),
        Bar(
            "dormant bytes asleep in B",
            asleep_share >= ASLEEP_OF_DORMANT_MIN,
            f"{asleep_share:.1%}",
            f"at least {ASLEEP_OF_DORMANT_MIN:.0%}",
            correctness=False,
        ),
        Bar(
            "stall",
            stall_share <= STALL_OF_STEP_MAX,
            f"{stall_share:.1%} of the step",
            f"at most {STALL_OF_STEP_MAX:.0%}",
            correctness=False,
        ),
    ]


def reduction(report: dict, account: str) -> float | None:
    """Returns the relative reduction of the phase-B peak by sleeping; None of no peak."""
    peaks = report["phase_b_peak_bytes"]
    awake = peaks["shared_awake"][account]
    return 1.0 - peaks["shared_asleep"][account] / awake if awake > 0 else None


def _exactness(measured: Measured) -> str:
    asleep, awake = (measured.peaks[mode] for mode in ("asleep", "awake"))
    if asleep["prefix"]["asleep_bytes_peak"] <= 0:
        return "nothing slept"
    # Equal digests of gradients that were not computed say nothing. NaN is not below infinity.
    if not 0.0 < asleep["gradient_norm"] < math.inf:
        return f"norm {asleep['gradient_norm']}"
    return "equal" if asleep["digest"] == awake["digest"] else "different"


def write(report: dict, path: Path) -> None:
    """Writes the report; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(report), indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _median(rounds: list[dict], mode: str, field: str) -> float:
    return median(r[mode][field] for r in rounds)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _finite(value):
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
