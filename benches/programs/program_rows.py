"""Rows of whole programs: same results, CPU time and peak memory over glibc's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from statistics import median

from pairs import alternate, median_ratio
from programs import PROGRAMS, Program
from rows import LOWER, Makers, Row
from running import Libraries, Result, difference, run

BARS = {
    "cpu_over_glibc_median": 1.05,
    "cpu_over_glibc_worst": 1.5,
    "rss_over_glibc_median": 1.25,
    "rss_over_glibc_worst": 2.0,
}
# After these no further pair of a program begins: some wait for a network for minutes.
SECONDS_MAX = 60.0
NAMES = ("programs_failed", "programs_missing", *BARS)


@dataclass
class Found:
    """What the programs showed, by name."""

    cpu: dict[str, float] = field(default_factory=dict)
    rss: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, program: Program, runs: list[tuple[Result, Result]]) -> None:
        for ours, theirs in runs:
            # A program that fails without dormouse too tells nothing.
            if theirs.status != 0:
                self.missing[program.name] = f"status {theirs.status} under glibc"
                return
            if reason := difference(ours, theirs, program.ignored):
                self.failed[program.name] = reason
                return
        self.cpu[program.name] = median_ratio([(a.cpu_seconds, b.cpu_seconds) for a, b in runs])
        self.rss[program.name] = median_ratio([(a.peak_bytes, b.peak_bytes) for a, b in runs])

    def rows(self) -> list[Row]:
        ran = len(self.cpu) + len(self.failed)
        rows = [
            Row(
                "programs_failed", "programs", LOWER,
                f"of {ran} that ran; {listed(self.failed) or 'none'}",
                # None ran: nothing was shown.
                float(len(self.failed)) if ran else None, 0.0,
            ),
            Row(
                "programs_missing", "programs", LOWER, listed(self.missing) or "none",
                float(len(self.missing)),
            ),
        ]  # fmt: skip
        for name, bar in BARS.items():
            ratios = self.cpu if name.startswith("cpu") else self.rss
            row = Row(name, "ratio", LOWER, "", bar=bar)
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                row.ours = median(ratios.values()) if name.endswith("median") else ratios[worst]
                row.how = listed({each: f"{ratio:.3g}" for each, ratio in ratios.items()})
            rows.append(row)
        return rows


def listed(found: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in found.items())


def program_makers(libraries: Libraries, chosen: str, pairs: int, check: bool) -> Makers:
    def rows() -> list[Row]:
        found = battery(libraries, chosen, pairs).rows()
        return found[:2] if check else found

    return [(NAMES, rows)]


def battery(libraries: Libraries, chosen: str, pairs: int) -> Found:
    found = Found()
    settings = libraries.settings()
    for program in PROGRAMS:
        if not any(fnmatch(program.name, pattern) for pattern in chosen.split(",")):
            continue
        if reason := program.missing():
            found.missing[program.name] = reason
            continue
        print(f"bench: {program.name}", file=sys.stderr, flush=True)
        found.add(program, runs(program, settings, pairs))
    return found


def runs(program: Program, settings: list[str], pairs: int) -> list[tuple[Result, Result]]:
    return alternate(
        pairs,
        lambda: run(program.command, settings),
        lambda: run(program.command, []),
        seconds_max=SECONDS_MAX,
    )
