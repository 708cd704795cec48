"""Rows, the table of them, and the file they are kept in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rows import HIGHER, LOWER, Row, measure, table, write


@pytest.mark.parametrize(
    ("better", "bar", "ours", "met"),
    [
        (LOWER, 300, 300, True),
        (LOWER, 300, 301, False),
        (LOWER, 0, 0, True),
        (HIGHER, 0.93, 0.93, True),
        (HIGHER, 0.93, 0.92, False),
        (HIGHER, 0.93, None, False),
        (HIGHER, 0.93, math.inf, False),
        (HIGHER, 0.93, math.nan, False),
        (LOWER, 300, -math.inf, False),
        (HIGHER, None, 1, None),
        (HIGHER, None, None, None),
    ],
)
def test_a_bar_is_met_or_not(
    better: str, bar: float | None, ours: float | None, met: bool | None
) -> None:
    assert Row("row", "unit", better, "", ours=ours, bar=bar).met is met


def test_a_row_that_lacks_a_peer_says_why() -> None:
    row = Row("row", "unit", LOWER, "how")
    row.put("ours", 1)
    row.put("peer", None)
    row.note("peer", "no compiler")
    assert row.record() == {
        "name": "row",
        "unit": "unit",
        "ours": 1,
        "bar": None,
        "better": LOWER,
        "met": None,
        "peers": {"peer": None},
        "how": "how; peer not measured: no compiler",
    }


def test_rows_of_an_earlier_run_stay(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "alloc.json"
    write([Row("a", "unit", LOWER, "", ours=1), Row("b", "unit", LOWER, "", ours=2)], path)
    write([Row("b", "unit", LOWER, "", ours=3)], path)
    assert [(row["name"], row["ours"]) for row in json.loads(path.read_text())] == [
        ("a", 1),
        ("b", 3),
    ]


def test_rows_of_an_earlier_run_that_fail_now_do_not_stay(tmp_path: Path) -> None:
    def fails() -> list[Row]:
        raise RuntimeError("the driver ended")

    path = tmp_path / "alloc.json"
    write([Row(name, "unit", LOWER, "", ours=1, bar=1) for name in ("a", "b")], path)
    with pytest.raises(RuntimeError):
        measure([(("a",), list), (("b",), fails)], "b", path)
    assert [row["name"] for row in json.loads(path.read_text())] == ["a"]


def test_columns_of_the_table_line_up() -> None:
    rows = [
        Row("short", "u", LOWER, "", ours=1234.5, bar=300, peers={"x": 2}),
        Row("much longer", "unit", HIGHER, "", ours=None, peers={"y": None}),
    ]
    head, first, second = table(rows).splitlines()
    assert head.split() == ["row", "unit", "ours", "bar", "met", "x", "y"]
    assert first.split() == ["short", "u", "1,234", "≤", "300", "NO", "2"]
    assert second.split() == ["much", "longer", "unit", "-", "-"]
    assert first.index("1,234") + len("1,234") == head.index("ours") + len("ours")


def test_rows_that_match_are_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def maker(*names: str):
        return names, lambda: [Row(name, "unit", LOWER, f"how {name}", ours=1) for name in names]

    out = tmp_path / "rows.json"
    makers = [maker("read", "read_bound"), maker("write"), maker("mark")]
    assert measure(makers, "*_bound,mark", out) == 0
    assert [row["name"] for row in json.loads(out.read_text())] == ["read", "read_bound", "mark"]
    assert "mark: how mark" in capsys.readouterr().out
    assert measure(makers, "none", tmp_path / "none.json") == 2
    assert not (tmp_path / "none.json").exists()
