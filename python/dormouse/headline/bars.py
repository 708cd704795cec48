"""Figures and bars of a cell, from its measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from . import arithmetic, expected
from .rows import LOWER, row
from .shapes import COMPILED, EAGER, HEADLINE, Cell, Geometry

GB = 1e9

# Of the headline cell. The published run has eight GPUs with sharded parameters.
SPEEDUP_MIN = {EAGER: 4.2, COMPILED: 3.2}
SPEEDUP_PUBLISHED = {EAGER: 4.115, COMPILED: 2.533}
SLEEPING_COSTS_MAX_PERCENT = 2.0
GIVEN_BACK_MIN_PERCENT = 97.0
STEP_PEAK_CUT_MIN_PERCENT = 45.0
PEAK_BARS = {
    "whole-step peak below awake": STEP_PEAK_CUT_MIN_PERCENT,
    "dormant bytes given back during B": GIVEN_BACK_MIN_PERCENT,
}
# What a budget is below the peak that the bar accepts: pages are whole, and streams take some.
LIMIT_MARGIN_PERCENT = 2.0
PHASE_B_CUT_PUBLISHED_PERCENT = 59.1
# Two sides that do the same work have the same loss but for rounding to BF16's 8 bits, which the
# mean over all tokens evens out. Generous: losses of either sign partly cancel in the sum.
LOSS_TOLERANCE = 0.05


@dataclass
class Measured:
    """Replies of the workers about one cell; out of memory is part of a reply.

    ``peaks``: ``dense``, ``awake``, ``asleep``, and ``limited``: asleep under a device budget.
    ``rounds``: the first three, ``dense`` in the first rounds only. ``limited``: a timed run under
    that budget.
    """

    cell: Cell
    peaks: dict[str, dict] = field(default_factory=dict)
    rounds: list[dict[str, dict]] = field(default_factory=list)
    prediction: dict = field(default_factory=dict)
    kernels: dict = field(default_factory=dict)
    limited: dict = field(default_factory=dict)


def limit_bytes(measured: Measured, parameter_bytes: int) -> int | None:
    """Returns the device budget under which the whole-step peak meets its bar: of parameters,
    gradients and a share of the awake peak. None if that peak was not measured."""
    if "phases" not in measured.peaks.get("awake", {}):
        return None
    share = 1.0 - (STEP_PEAK_CUT_MIN_PERCENT + LIMIT_MARGIN_PERCENT) / 100.0
    return 2 * parameter_bytes + int(share * _peak(measured, "awake"))


def has_time(measured: Measured) -> bool:
    """Returns whether any timed run of ours ended."""
    return _median(measured, "asleep") is not None


def rows_of(measured: Measured, geometry: Geometry) -> list[dict]:
    """Returns the rows of the cell so far."""
    return [*_peak_rows(measured), *_time_rows(measured, geometry), *_limited_rows(measured)]


def unmeasured(cell: Cell, reason: str) -> dict:
    """Returns the cell's first row, without a figure."""
    how = f"not measured: {reason}"
    return row(_speedup_name(cell), "×", None, bar=_speedup_min(cell), how=how)


def _speedup_name(cell: Cell) -> str:
    return f"{cell}: speedup, dense ÷ asleep"


def _speedup_min(cell: Cell) -> float | None:
    return SPEEDUP_MIN[cell.way] if cell in HEADLINE else None


def _time_rows(m: Measured, geometry: Geometry) -> list[dict]:
    cell, is_headline = m.cell, m.cell in HEADLINE
    dense, awake, asleep = (_median(m, side) for side in ("dense", "awake", "asleep"))
    if asleep is None:
        reason = _why_no_run([r["asleep"] for r in m.rounds])
        return [unmeasured(cell, reason), _sleeping_costs(m)]
    prompt, response = cell.tokens(geometry)
    work = arithmetic.work(geometry, prompt, response, cell.responses)
    turns = sum("dense" in each for each in m.rounds)
    how = f"medians of {len(m.rounds)} rounds, dense in {turns} of them"
    asleep_runs = [r["asleep"] for r in m.rounds if "prefix" in r["asleep"]]
    prefix = asleep_runs[-1]["prefix"]
    return [
        row(
            _speedup_name(cell),
            "×",
            _ratio(m, "dense", "asleep"),
            bar=_speedup_min(cell),
            how=_why_no_ratio(m, "dense", "asleep")
            or f"{how}; dense kernels {_seconds(m.kernels)}",
            published=SPEEDUP_PUBLISHED[cell.way] if is_headline else None,
            predicted=m.prediction.get("speedup"),
            awake=_ratio(m, "dense", "awake"),
        ),
        row(
            f"{cell}: step",
            "s",
            asleep,
            better=LOWER,
            how=f"{how}; attention by {_attention(asleep_runs[-1])}",
            dense=dense,
            awake=awake,
            dense_by_arithmetic=expected.seconds(work.dense, expected.CUDNN),
            ours_by_arithmetic=expected.seconds(work.ours, expected.CUDNN),
        ),
        *_phase_rows(m),
        _sleeping_costs(m),
        row(
            f"{cell}: stall",
            "s",
            prefix["stall_ns"] / 1e9,
            better=LOWER,
            how="of the last round, by the runtime's own clock",
            bound=prefix["stall_bound_ns"] / 1e9,
        ),
    ]


def _sleeping_costs(m: Measured) -> dict:
    why = _why_no_ratio(m, "asleep", "awake")
    if why is None and not all(_slept(r["asleep"]) for r in _rounds_of(m, "asleep", "awake")):
        why = "no figure: nothing slept"
    return row(
        f"{m.cell}: sleeping costs",
        "%",
        None if why else _percent(_ratio(m, "asleep", "awake")),
        bar=SLEEPING_COSTS_MAX_PERCENT if m.cell in HEADLINE else None,
        better=LOWER,
        how=why or "asleep over awake in the same round, medians",
    )


def _phase_rows(m: Measured) -> list[dict]:
    """What each phase takes, asleep and awake: where sleeping costs time."""
    last = {side: m.rounds[-1].get(side, {}).get("phase_seconds", {}) for side in ("asleep", "awake")}
    return [
        row(
            f"{m.cell}: phase {name}",
            "s",
            seconds,
            better=LOWER,
            how="asleep, of the last round, on the device",
            awake=last["awake"].get(name),
        )
        for name, seconds in last["asleep"].items()
    ]


def _peak_rows(m: Measured) -> list[dict]:
    cell, is_headline = m.cell, m.cell in HEADLINE
    asleep = m.peaks.get("asleep", {})
    if "phases" not in asleep:
        how = f"not measured: {_why_no_run([asleep])}"
        return [
            row(f"{cell}: {name}", "%", None, bar=bar if is_headline else None, how=how)
            for name, bar in PEAK_BARS.items()
        ]
    sides = ("dense", "awake", "asleep")
    counters = {side: _peak(m, side, counter="allocator_peak") for side in sides if side in m.peaks}
    how = (
        "driver's figure read each ms, above parameters and gradients; "
        f"by the allocators' counters {_gb(counters)}"
    )
    b = {side: _peak(m, side, "B") for side in ("asleep", "awake")}
    step = {side: _peak(m, side) for side in ("asleep", "awake", "dense")}
    # A dense run has no phase B; its peak is used instead.
    b["dense"] = step["dense"]
    rows = []
    for name, peaks in (("phase-B", b), ("whole-step", step)):
        mine = peaks.pop("asleep")
        rows.append(
            row(f"{cell}: {name} peak", "GB", mine / GB, better=LOWER, how=how, **_in_gb(peaks))
        )
        is_held = is_headline and name == "whole-step"
        rows.append(
            row(
                f"{cell}: {name} peak below awake",
                "%",
                _below(mine, peaks["awake"]),
                bar=STEP_PEAK_CUT_MIN_PERCENT if is_held else None,
                how=how,
                below_dense=_below(mine, peaks["dense"]),
                published=PHASE_B_CUT_PUBLISHED_PERCENT if name == "phase-B" else None,
            )
        )
    return [*rows, _given_back(m)]


def _limited_rows(m: Measured) -> list[dict]:
    """The whole-step peak under a budget, and what the budget costs."""
    if "limited" not in m.peaks:
        return []
    found, name = m.peaks["limited"], f"{m.cell}: whole-step peak below awake, under a budget"
    if "phases" not in found:
        return [row(name, "%", None, how=f"out of memory: {found.get('out_of_memory')}")]
    peak, asleep = _peak(m, "limited"), _median(m, "asleep")
    seconds = m.limited.get("seconds")
    return [
        row(
            name,
            "%",
            _below(peak, _peak(m, "awake")),
            how=f"{peak / GB:.2f} GB above parameters and gradients, by the driver's figure",
        ),
        row(
            f"{m.cell}: the budget costs",
            "%",
            None if None in (seconds, asleep) else _percent(seconds / asleep),
            better=LOWER,
            how="one step over the median of those asleep without a budget",
        ),
    ]


def _given_back(m: Measured) -> dict:
    prefix = m.peaks["asleep"]["prefix"]
    dormant = prefix["dormant_bytes"]
    medians = [_peak(m, side, "B", "driver_median") for side in ("awake", "asleep")]
    fell = None if None in medians or not dormant else 100.0 * (medians[0] - medians[1]) / dormant
    return row(
        f"{m.cell}: dormant bytes given back during B",
        "%",
        fell,
        bar=GIVEN_BACK_MIN_PERCENT if m.cell in HEADLINE else None,
        how=f"driver's figure in B, medians, awake minus asleep, of {dormant / GB:.2f} GB dormant",
        runtimes_own_count=100.0 * prefix["asleep_at_b_bytes"] / dormant if dormant else None,
    )


def _peak(m: Measured, side: str, phase: str | None = None, counter: str = "driver_peak"):
    """Returns the figure of a phase or the step; None if not measured."""
    phases = m.peaks.get(side, {}).get("phases", {})
    found = [figures[counter] for name, figures in phases.items() if phase in (None, name)]
    return None if not found or None in found else max(found)


def _median(m: Measured, side: str) -> float | None:
    found = [r[side]["seconds"] for r in m.rounds if "seconds" in r.get(side, {})]
    return median(found) if found else None


def _ratio(m: Measured, above: str, below: str) -> float | None:
    """Returns the median over rounds that have both values; None if they say nothing."""
    if _why_no_ratio(m, above, below):
        return None
    both = _rounds_of(m, above, below)
    return median(r[above]["seconds"] / r[below]["seconds"] for r in both)


def _rounds_of(m: Measured, *sides: str) -> list[dict[str, dict]]:
    return [r for r in m.rounds if all("seconds" in r.get(side, {}) for side in sides)]


def _why_no_ratio(m: Measured, *sides: str) -> str | None:
    """Returns why the seconds of two sides make no ratio, or None. Losses show that both did the
    same work."""
    both = _rounds_of(m, *sides)
    if not both:
        without = (side for side in sides if _median(m, side) is None)
        reasons = [f"{s}: {_why_no_run([r[s] for r in m.rounds if s in r])}" for s in without]
        return "no figure: " + ("; ".join(reasons) or "no round has both sides")
    for each in both:
        losses = [each[side].get("loss") for side in sides]
        if not _are_near(*losses):
            seen = ", ".join(f"{side} {loss}" for side, loss in zip(sides, losses, strict=True))
            return f"no figure: losses {seen}; accepted: equal within {LOSS_TOLERANCE:.0%}"
    return None


def _are_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None or not math.isfinite(one) or not math.isfinite(other):
        return False
    return math.isclose(one, other, rel_tol=LOSS_TOLERANCE)


def _why_no_run(replies: list[dict]) -> str:
    found = [reply["out_of_memory"] for reply in replies if "out_of_memory" in reply]
    return f"out of memory: {found[-1]}" if found else "no run has ended yet"


def _slept(reply: dict) -> bool:
    return reply.get("prefix", {}).get("asleep_bytes_peak", 0) > 0


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100.0 * (ratio - 1.0)


def _below(mine: float, other: float | None) -> float | None:
    return None if other is None or other <= 0 else 100.0 * (1.0 - mine / other)


def _in_gb(peaks: dict) -> dict:
    return {side: None if peak is None else peak / GB for side, peak in peaks.items()}


def _gb(peaks: dict) -> str:
    known = {side: peak for side, peak in peaks.items() if peak is not None}
    return ", ".join(f"{side} {peak / GB:.2f} GB" for side, peak in known.items()) or "unknown"


def _seconds(kernels: dict) -> str:
    return ", ".join(f"{name} {taken:.3f} s" for name, taken in kernels.items()) or "torch's choice"


def _attention(run: dict) -> str:
    """Names the kernels that a run's attention chose, and the time of those that were measured."""

    def measured_of(choice: dict) -> str:
        seconds = (f"{name} {taken * 1e3:.2f} ms" for name, taken in choice["seconds"].items())
        return f"{choice['kernel']} ({choice['calls']}: {', '.join(seconds) or 'none measured'})"

    return ", ".join(map(measured_of, run["attention"])) or "the only kernel"
