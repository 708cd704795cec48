"""Rows of whole programs: same results, CPU time and peak memory over glibc's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
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
# Other allocators' preload libraries, as Debian installs them; measured where they are.
PEERS = {"jemalloc": Path("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")}
# After these no further pair of a program begins: some wait for a network for minutes.
SECONDS_MAX = 60.0
NAMES = ("programs_failed", "programs_missing", *BARS)


Ratios = dict[str, float]


@dataclass(frozen=True)
class Glibc:
    """A program's run without any library, and beside it those under each peer's."""

    result: Result
    peers: dict[str, Result] = field(default_factory=dict)


@dataclass
class Found:
    """What the programs showed, by name."""

    cpu: Ratios = field(default_factory=dict)
    rss: Ratios = field(default_factory=dict)
    # By peer.
    peers_cpu: dict[str, Ratios] = field(default_factory=dict)
    peers_rss: dict[str, Ratios] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, program: Program, runs: list[tuple[Result, Glibc]]) -> None:
        pairs = [(ours, glibc.result) for ours, glibc in runs]
        for ours, theirs in pairs:
            # A program that fails without dormouse too tells nothing.
            if theirs.status != 0:
                self.missing[program.name] = f"status {theirs.status} under glibc"
                return
            if reason := difference(ours, theirs, program.ignored):
                self.failed[program.name] = reason
                return
        self.cpu[program.name], self.rss[program.name] = ratios(pairs)
        for peer in runs[0][1].peers:
            pairs = [(glibc.peers[peer], glibc.result) for _, glibc in runs]
            # A program that fails under the peer has no figure there.
            if all(result.status == theirs.status for result, theirs in pairs):
                cpu, rss = ratios(pairs)
                self.peers_cpu.setdefault(peer, {})[program.name] = cpu
                self.peers_rss.setdefault(peer, {})[program.name] = rss

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
            cpu = name.startswith("cpu")
            row = Row(name, "ratio", LOWER, "", bar=bar)
            if found := self.cpu if cpu else self.rss:
                chosen = median if name.endswith("median") else max
                row.ours = chosen(found.values())
                row.how = each(found)
                for peer, theirs in (self.peers_cpu if cpu else self.peers_rss).items():
                    row.put(peer, chosen(theirs.values()))
                    row.how += f". {peer}: {each(theirs)}"
            rows.append(row)
        return rows


def ratios(pairs: list[tuple[Result, Result]]) -> tuple[float, float]:
    """Medians of CPU time and peak memory over the other's."""
    return (
        median_ratio([(a.cpu_seconds, b.cpu_seconds) for a, b in pairs]),
        median_ratio([(a.peak_bytes, b.peak_bytes) for a, b in pairs]),
    )


def each(found: Ratios) -> str:
    return listed({name: f"{ratio:.3g}" for name, ratio in found.items()})


def listed(found: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in found.items())


def program_makers(libraries: Libraries, chosen: str, pairs: int, check: bool) -> Makers:
    peers = {} if check else {name: path for name, path in PEERS.items() if path.exists()}

    def rows() -> list[Row]:
        found = battery(libraries, chosen, pairs, peers).rows()
        return found[:2] if check else found

    return [(NAMES, rows)]


def battery(libraries: Libraries, chosen: str, pairs: int, peers: dict[str, Path]) -> Found:
    found = Found()
    settings = libraries.settings()
    for program in PROGRAMS:
        if not any(fnmatch(program.name, pattern) for pattern in chosen.split(",")):
            continue
        if reason := program.missing():
            found.missing[program.name] = reason
            continue
        print(f"bench: {program.name}", file=sys.stderr, flush=True)
        found.add(program, runs(program, settings, pairs, peers))
    return found


def runs(
    program: Program, settings: list[str], pairs: int, peers: dict[str, Path]
) -> list[tuple[Result, Glibc]]:
    def under_peers() -> dict[str, Result]:
        return {name: run(program.command, [f"LD_PRELOAD={path}"]) for name, path in peers.items()}

    return alternate(
        pairs,
        lambda: run(program.command, settings),
        lambda: Glibc(run(program.command, []), under_peers()),
        seconds_max=SECONDS_MAX,
    )
