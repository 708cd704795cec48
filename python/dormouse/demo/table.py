"""The report as text."""

from __future__ import annotations

from collections.abc import Sequence

from .report import Bar

MIB = 1 << 20

MET, MISSED = "✓", "✗ missed"


def render(report: dict, bars: Sequence[Bar]) -> str:
    """Formats the report: about 40 lines of at most 100 columns."""
    setting = report["setting"]
    parts = [
        f"One GRPO update of {setting['model']}, {setting['dtype']}, {setting['threads']} threads.",
        f"Group {setting['group']}: prompt {setting['prompt_tokens']} tokens, "
        f"{setting['responses']} responses of {setting['response_tokens_mean']:.0f} on average.",
        "",
        grid(("", "wall", "CPU", "step peak", "phase-B peak", "tracked"), _mode_rows(report)),
        "Seconds are medians; peaks are resident memory above idle, and tracked is the library's",
        "own account of the phase-B peak.",
        "",
        grid(("", ""), _fact_rows(report), heading=False),
        "",
        grid(("held to", "measured", "accepted", ""), _bar_rows(bars)),
        "Gradients: distance to FP64, shared ÷ dense, over all parameters and one by one.",
    ]
    if report.get("groups"):
        heads = ("group", "prompt", "dense", "shared", "speedup", "predicted")
        parts += ["", grid(heads, _group_rows(report))]
    parts += ["", *(f"{kind}: {path}" for kind, path in report["dumps"].items())]
    return "\n".join(parts)


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], heading: bool = True) -> str:
    """Draws a table with box characters; only the first column is left-aligned."""
    body = [list(heads), *map(list, rows)] if heading else list(map(list, rows))
    widths = [max(len(row[i]) for row in body) for i in range(len(heads))]

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    lines = [rule("┌", "┬", "┐")]
    for index, row in enumerate(body):
        cells = (f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True))
        lines.append("│" + "│".join(cells) + "│")
        if heading and index == 0:
            lines.append(rule("├", "┼", "┤"))
    lines.append(rule("└", "┴", "┘"))
    return "\n".join(lines)


def _mode_rows(report: dict) -> list[list[str]]:
    modes = (
        ("dense", "dense", "dense"),
        ("shared, awake", "shared_awake", "shared_awake"),
        ("shared, asleep", "shared", "shared_asleep"),
    )
    rows = []
    for title, prefix, name in modes:
        phase_b = report["phase_b_peak_bytes"][name]
        rows.append(
            [
                title,
                f"{report[f'{prefix}_seconds']:6.2f} s",
                f"{report[f'{prefix}_cpu_seconds']:6.2f} s",
                _mib(report["step_peak_bytes"][name]["resident"]),
                "-" if phase_b is None else _mib(phase_b["resident"]),
                "-" if phase_b is None else _mib(phase_b["tracked"]),
            ]
        )
    return rows


def _fact_rows(report: dict) -> list[list[str]]:
    error = report["grad_error"]
    slept = ", ".join(f"{tier} {_mib(count)}" for tier, count in report["bytes_slept"].items())
    return [
        ["speedup, dense ÷ shared asleep", f"{report['speedup']:.2f} ×"],
        ["predicted from arithmetic alone", f"{report['predicted_speedup']:.2f} ×"],
        ["tokens, dense ÷ shared", f"{report['token_ratio']:.2f} ×"],
        ["distance to FP64 gradients, shared", f"{error['shared_global']:.1e}"],
        ["distance to FP64 gradients, dense", f"{error['dense_global']:.1e}"],
        ["dormant", _mib(report["dormant_bytes"])],
        ["slept, per tier", slept],
        ["stall", f"{report['stall_seconds']:.3f} s"],
        ["stall no schedule could avoid", f"{report['stall_bound_seconds']:.3f} s"],
    ]


def _bar_rows(bars: Sequence[Bar]) -> list[list[str]]:
    return [[bar.name, bar.value, bar.accepted, MET if bar.met else MISSED] for bar in bars]


def _group_rows(report: dict) -> list[list[str]]:
    return [
        [
            group["id"],
            str(group["prompt_tokens"]),
            f"{group['dense_seconds']:.2f} s",
            f"{group['shared_seconds']:.2f} s",
            f"{group['speedup']:.2f} ×",
            f"{group['predicted_speedup']:.2f} ×",
        ]
        for group in report["groups"]
    ]


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f} MiB"
