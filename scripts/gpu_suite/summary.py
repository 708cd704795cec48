"""What a person, or the next command, reads first: summary.json and summary.md in one folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

from . import facts as machine
from .table import MARKS, number

PART_KEYS = ("part", "status", "seconds", "why", "rows")


def write(title: str, results: list[dict], facts: dict, folder: Path, details: Path) -> None:
    """Writes both, anew after every part, and the details of the last part."""
    short = [{key: result[key] for key in PART_KEYS} for result in results]
    _json({"title": title, "place": facts, "parts": short}, folder / "summary.json")
    text = "\n".join(markdown(title, results, facts)) + "\n"
    (folder / "summary.md").write_text(text, encoding="utf-8")
    if results:
        _json(results[-1], details / f"{results[-1]['part']}.json")


def markdown(title: str, results: list[dict], facts: dict) -> list[str]:
    """The lines of summary.md."""
    lines = [
        f"# {title}",
        "",
        *facts_lines(facts),
        "",
        "| part | status | s | why |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each['part']} | {each['status']} | {each['seconds']:.0f} | {_cell(each['why'])} |"
        for each in results
    ]
    lines += ["", "| figure | ours | unit | accepted | | others | how |", "|---" * 7 + "|"]
    for result in results:
        lines += [_row(result["part"], each) for each in result["rows"]]
    return lines


def facts_lines(facts: dict) -> list[str]:
    """One line for what was counted, one for versions."""
    driver, packages = facts.get("driver", {}), facts.get("packages", {})
    place = {
        "GPU": driver.get("name"),
        "driver": driver.get("driver"),
        "CUDA of the driver": machine.dotted(driver.get("cuda")),
        "capability": machine.dotted(driver.get("capability")),
        "cuDNN": facts.get("cudnn"),
        "CUDA of torch": facts.get("torch_cuda"),
        "Python": facts.get("python"),
        **packages,
        "compiler": facts.get("compiler"),
        "cores": facts.get("cores"),
        **facts.get("variables", {}),
    }
    known = [f"{name} {'none' if value is None else value}" for name, value in place.items()]
    return ["; ".join(known) + "."] if facts else ["`place` did not run."]


def _row(part: str, row: dict) -> str:
    sign = "≥" if row["better"] == "higher" else "≤"
    bar = "" if row["bar"] is None else f"{sign} {number(row['bar'])}"
    others = ", ".join(
        f"{name} {number(value)}" for name, value in row["peers"].items() if value is not None
    )
    cells = (
        f"{part}: {row['name']}",
        number(row["ours"]),
        row["unit"],
        bar,
        MARKS[row["met"]],
        others,
        row["how"],
    )
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _json(content, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
