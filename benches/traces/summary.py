"""What a trace asks of an allocator.

    python benches/traces/summary.py benches/traces/dense_update.csv.xz
    python benches/traces/summary.py --table benches/traces/*.csv.xz

The peak of live requested bytes is the least any allocator can hold. Beside it: what it would be
if each block of 1 MiB and more had whole 2 MiB pages to itself, so that the difference is what
packing such blocks together is worth; and how far best fit would let one range of addresses grow,
which is what is lost without pages.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import best_fit
from format import ALLOCATE, FAILURE, Event, Trace, TraceFormatError, read

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
NOT_KNOWN = "–"
PAGED_BYTES_MIN = 1 * MIB  # smaller blocks share pages in any design


def paged(size: int) -> int:
    """Bytes of a block that shares no page with another, unless it is small."""
    return size if size < PAGED_BYTES_MIN else -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass
class Summary:
    """Figures of one trace; bytes are requested ones."""

    events: int = 0
    allocations: int = 0
    failures: int = 0
    threads: int = 0
    streams: int = 0
    windows: int = 0
    requested_bytes: int = 0
    """Of all allocations together."""
    peak_bytes: int = 0
    """Most live at once: the lower bound of every allocator."""
    peak_event: int = 0
    """The event after which it is reached first."""
    peak_blocks: int = 0
    """Live at that moment, as the next three."""
    peak_scoped_bytes: int = 0
    peak_small_bytes: int = 0
    """In blocks below 1 MiB."""
    peak_paged_bytes: int = 0
    """With blocks of 1 MiB and more rounded up to whole pages."""
    paged_peak_bytes: int = 0
    """Most of that at any moment, which may be another."""
    scoped_most_bytes: int = 0
    """Most bytes of windows live at any moment."""
    blocks_most: int = 0
    end_bytes: int = 0
    """Never freed."""
    best_fit_bytes: int = 0
    """Of addresses, for best fit in one range that every stream shares."""

    @property
    def page_cost(self) -> float:
        """Share that rounding adds to the peak."""
        return self.peak_paged_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0

    @property
    def best_fit_cost(self) -> float:
        """Share that best fit's holes add to the peak."""
        return self.best_fit_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0

    @property
    def scoped_share(self) -> float:
        """Share of the peak that lies in windows, and may sleep."""
        return self.peak_scoped_bytes / self.peak_bytes if self.peak_bytes else 0.0


def summarise(events: list[Event]) -> Summary:
    """The figures of a trace, or of a part that begins with nothing live."""
    s = Summary(events=len(events))
    s.threads, s.streams = (len({getattr(e, f) for e in events}) for f in ("thread", "stream"))
    s.windows = len({e.scope for e in events} - {0})
    now = Summary()
    for number, event in enumerate(events):
        if event.action == FAILURE:
            s.failures += 1
            continue
        _count(now, event, 1 if event.action == ALLOCATE else -1)
        if event.action != ALLOCATE:
            continue
        s.allocations += 1
        s.requested_bytes += event.size
        if now.end_bytes > s.peak_bytes:
            s.peak_bytes, s.peak_event = now.end_bytes, number
            s.peak_blocks, s.peak_scoped_bytes = now.peak_blocks, now.peak_scoped_bytes
            s.peak_small_bytes, s.peak_paged_bytes = now.peak_small_bytes, now.peak_paged_bytes
        s.paged_peak_bytes = max(s.paged_peak_bytes, now.peak_paged_bytes)
        s.scoped_most_bytes = max(s.scoped_most_bytes, now.peak_scoped_bytes)
        s.blocks_most = max(s.blocks_most, now.peak_blocks)
    s.end_bytes = now.end_bytes
    s.best_fit_bytes = best_fit.span_bytes(events)
    return s


def _count(now: Summary, event: Event, sign: int) -> None:
    """Keeps what is live in ``now``, under the names of the peak's figures."""
    now.end_bytes += sign * event.size
    now.peak_blocks += sign
    now.peak_scoped_bytes += sign * event.size * (event.scope != 0)
    now.peak_small_bytes += sign * event.size * (event.size < PAGED_BYTES_MIN)
    now.peak_paged_bytes += sign * paged(event.size)


def histogram(events: list[Event]) -> list[tuple[int, int, int]]:
    """``(least, blocks, bytes)`` of allocations from ``least`` to just below twice it."""
    blocks, nbytes = Counter(), Counter()
    for event in events:
        if event.action == ALLOCATE:
            octave = 1 << (event.size.bit_length() - 1)
            blocks[octave] += 1
            nbytes[octave] += event.size
    return [(octave, blocks[octave], nbytes[octave]) for octave in sorted(blocks)]


def text(trace: Trace) -> str:
    """Everything, for reading."""
    s = summarise(trace.events)
    rows = [f"{key:<28}{value}" for key, value in trace.about.items()]
    rows += [
        f"{'events':<28}{s.events}: {s.allocations} allocations, {s.failures} failures",
        f"{'threads, streams, windows':<28}{s.threads}, {s.streams}, {s.windows}",
        f"{'requested in all':<28}{_size(s.requested_bytes)}",
        f"{'peak live':<28}{s.peak_bytes} B = {_size(s.peak_bytes)}, at event {s.peak_event}",
        f"{'  blocks':<28}{s.peak_blocks} (most at any moment {s.blocks_most})",
        f"{'  below 1 MiB':<28}{_size(s.peak_small_bytes)}",
        f"{'  in windows':<28}{_size(s.peak_scoped_bytes)} = {s.scoped_share:.1%} "
        f"(most at any moment {_size(s.scoped_most_bytes)})",
        f"{'  in pages of their own':<28}{_size(s.peak_paged_bytes)} = +{s.page_cost:.2%} "
        f"(peak of it {_size(s.paged_peak_bytes)})",
        f"{'  by best fit':<28}{_size(s.best_fit_bytes)} = +{s.best_fit_cost:.2%}",
        f"{'  by torch':<28}{_torch_cost(trace)}",
        f"{'never freed':<28}{_size(s.end_bytes)}",
        f"{'size from':<16}{'blocks':>12}{'bytes':>16}",
    ]
    rows += [f"{_size(o):<16}{n:>12}{_size(b):>16}" for o, n, b in histogram(trace.events)]
    return "\n".join(rows)


def table(named: list[tuple[str, Trace]]) -> str:
    """A line of Markdown for each, and for each of its parts."""
    lines = [
        "| trace | events | peak live, MiB | live blocks | streams | threads | windows "
        "| in windows | own pages | best fit | torch |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, trace in named:
        lines.append(_table_row(name, summarise(trace.events), _torch_cost(trace)))
        lines += [_table_row(f"… {part}", summarise(e)) for part, e in trace.parts().items()]
    return "\n".join(lines)


def _torch_cost(trace: Trace) -> str:
    """What torch's own allocator took beyond what it was asked for, where the header has it."""
    figures = [trace.about.get(f"torch-peak-{name}-bytes") for name in ("requested", "reserved")]
    if None in figures:
        return NOT_KNOWN
    requested, reserved = map(int, figures)
    return f"+{reserved / requested - 1:.2%}"


def _table_row(name: str, s: Summary, torch_cost: str = NOT_KNOWN) -> str:
    return (
        f"| {name} | {s.events:,} | {s.peak_bytes / MIB:,.1f} | {s.peak_blocks:,} "
        f"| {s.streams} | {s.threads} | {s.windows} | {s.scoped_share:.1%} "
        f"| +{s.page_cost:.2%} | +{s.best_fit_cost:.2%} | {torch_cost} |"
    )


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="one line of Markdown for each file")
    options = parser.parse_args(arguments)
    try:
        traces = [(path.name.split(".")[0], read(path)) for path in options.files]
    except (TraceFormatError, OSError) as error:
        print(f"summary: {error}", file=sys.stderr)
        return 2
    print(table(traces) if options.table else "\n\n".join(text(t) for _, t in traces))
    return 0


if __name__ == "__main__":
    sys.exit(main())
