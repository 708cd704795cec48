"""The figures of a trace, counted by hand."""

from __future__ import annotations

import pytest
import summary
from builder import Builder
from command import HERE
from format import FAILURE, Event, Trace, read, write
from summary import MIB

KIB = 1 << 10


def made() -> list[Event]:
    trace = Builder()
    kept = trace.allocate(3 * MIB, scope=1)  # 4 MiB in pages of its own
    first = trace.allocate(512 * KIB, stream=1)
    trace.free(trace.allocate(1 * MIB, thread=1))  # the peak: 2 MiB more in pages
    trace.free(first)
    trace.events.append(Event(0, FAILURE, 0, 1 << 40, 0))
    trace.free(kept)
    trace.allocate(4 * MIB, scope=2)
    return trace.events


def test_figures():
    s = summary.summarise(made())
    assert (s.events, s.allocations, s.failures) == (8, 4, 1)
    assert (s.threads, s.streams, s.windows) == (2, 2, 2)
    assert (s.peak_bytes, s.peak_event, s.peak_blocks) == (4 * MIB + 512 * KIB, 2, 3)
    assert s.requested_bytes == 8 * MIB + 512 * KIB
    assert s.peak_small_bytes == 512 * KIB
    assert s.peak_scoped_bytes == 3 * MIB
    assert s.scoped_most_bytes == 4 * MIB
    assert s.peak_paged_bytes == s.paged_peak_bytes == 6 * MIB + 512 * KIB
    assert s.page_cost == pytest.approx(4 / 9)
    assert s.end_bytes == 4 * MIB
    # 3 MiB, 512 KiB, 1 MiB; the last one fits where all of them were.
    assert s.best_fit_bytes == 4 * MIB + 512 * KIB


@pytest.mark.parametrize(
    ("size", "pages"),
    [(1, 1), (MIB - 1, MIB - 1), (MIB, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)],
)
def test_pages(size, pages):
    assert summary.paged(size) == pages


def test_an_empty_trace_has_figures():
    s = summary.summarise([])
    assert (s.peak_bytes, s.page_cost, s.scoped_share, s.best_fit_cost) == (0, 0.0, 0.0, 0.0)


def test_sizes_by_octave():
    assert summary.histogram(made()) == [
        (512 * KIB, 1, 512 * KIB),
        (1 * MIB, 1, 1 * MIB),
        (2 * MIB, 1, 3 * MIB),
        (4 * MIB, 1, 4 * MIB),
    ]


def test_the_command_prints_them(tmp_path, capsys):
    path = tmp_path / "t.csv"
    write(path, Trace({"about": "x", "command": "y", "parts": "a 0, b 7"}, made()))
    assert summary.main([str(path)]) == 0
    assert "4.5 MiB, at event 2" in capsys.readouterr().out
    assert summary.main(["--table", str(path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| t", "| … a", "| … b"]
    assert rows[2].endswith("| – |")
    torch = {"torch-peak-requested-bytes": "100", "torch-peak-reserved-bytes": "150"}
    write(path, Trace({"about": "x", "command": "y"} | torch, made()))
    assert summary.main(["--table", str(path)]) == 0
    assert capsys.readouterr().out.endswith("| +50.00% |\n")
    path.write_text("nonsense\n")
    assert summary.main([str(path)]) == 2
    assert "t.csv:1: columns 'nonsense'" in capsys.readouterr().err


def test_the_table_in_the_documentation_is_this_one():
    named = [(path.name.split(".")[0], read(path)) for path in sorted(HERE.glob("*.csv.xz"))]
    page = HERE.parents[1] / "docs" / "traces.md"
    command = "python benches/traces/summary.py --table benches/traces/*.csv.xz"
    assert summary.table(named) in page.read_text(), f"take what this prints: {command}"
