"""Results as a person reads them."""

from __future__ import annotations

MARKS = {True: "met", False: "MISSED", None: ""}
NAME_COLUMNS = 56


def of(results: list[dict]) -> str:
    """A line per part, and one per figure below it."""
    return "\n".join(line for result in results for line in part(result))


def part(result: dict) -> list[str]:
    """One part's lines."""
    why = f"  {result['why']}" if result["why"] else ""
    head = f"{result['part']:<12} {result['status']:<10} {result['seconds']:7.1f} s{why}"
    return [head, *(_line(each) for each in result["rows"])]


def _line(row: dict) -> str:
    sign = "≥" if row["better"] == "higher" else "≤"
    bar = "" if row["bar"] is None else f"{sign} {number(row['bar'])}"
    known = {name: value for name, value in row["peers"].items() if value is not None}
    peers = ", ".join(f"{name} {number(value)}" for name, value in known.items())
    return (
        f"  {row['name']:<{NAME_COLUMNS}} {number(row['ours']):>10} {row['unit']:<8}"
        f" {bar:<9} {MARKS[row['met']]:<7} {peers}"
    ).rstrip()


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
