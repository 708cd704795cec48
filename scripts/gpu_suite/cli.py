"""What a GPU has to show, part by part, each with a time limit.

    scripts/gpu-suite --plan 1 --out results        # then 2, then 3: docs/evidence/gpu.md
    scripts/gpu-suite --list
    scripts/gpu-suite --only place,conformance,copies --out results
    scripts/gpu-suite --only headline:10k/2k:32:eager --seconds 590 --out results

Writes summary.json and summary.md into a folder of their own, OUT/plan-N or OUT/parts, anew after
each part; what stands behind them goes to OUT/details. Ends with 0 where every part that could run
held, with 1 where one did not.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import facts as machine
from . import limits, needs, options, parts, result, summary, table
from .commands import CannotRun, Setting
from .paths import Paths

# A part with less than this is not started.
SECONDS_MIN = 5.0
HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen parts; returns the process's exit status."""
    asked = options.parse(arguments, __doc__)
    if asked.list:
        print("\n".join(f"{p.name:<12} {p.seconds:>4} s  {p.what}" for p in parts.PARTS))
        return 0
    # A terminated suite ends its part's processes too, and keeps what it had.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    paths = Paths.find(asked.bundle, asked.lib, asked.gpu_check)
    old = needs.older_driver(machine.driver()["cuda"], paths.root)
    if old:
        print(old, flush=True)
    setting = Setting(
        paths,
        asked.tiny,
        asked.device,
        asked.out,
        asked.host_gib,
        asked.nvme_dir,
        asked.nvme_gib,
        layers=asked.layers,
        microbatch_tokens=asked.microbatch_tokens,
    )
    run = Run(setting, asked.name, asked.title, time.monotonic() + (asked.seconds or math.inf))
    return run.all(asked.chosen, asked.limit, asked.shares)


@dataclass
class Run:
    """The parts of one command, one after the other."""

    setting: Setting
    name: str
    title: str
    deadline: float
    facts: dict = field(default_factory=dict)
    results: list[dict] = field(default_factory=list)

    def all(
        self, chosen: list[parts.Chosen], seconds: dict[str, float], shares: frozenset[str]
    ) -> int:
        """Runs them; returns the exit status. What the parts before it have left goes to the next
        one of ``shares``."""
        limits_of = [seconds.get(part.name, part.seconds) for part, _ in chosen]
        for index, (part, details) in enumerate(chosen):
            left, limit = self.deadline - time.monotonic(), limits_of[index]
            if part.name in shares:
                limit = max(limit, left - sum(limits_of[index + 1 :]))
            found = self.one(part, details, min(limit, left))
            self.results.append(found)
            print("\n".join(table.part(found)), flush=True)
            if part.name == parts.PLACE:
                self.facts = next(iter(found.get("details", [])), {})
                self._announce(chosen[index + 1 :])
            self._write()
        statuses = [found["status"] for found in self.results]
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in result.STATUSES if s in statuses)
        print(f"{len(statuses)} parts: {counts}; {self.folder}/summary.md")
        return int(any(status not in (result.HELD, result.CANNOT_RUN) for status in statuses))

    def one(self, part: parts.Part, details: tuple[str, ...], seconds: float) -> dict:
        """A part's result: not started where the machine lacks what it needs."""
        why = self._why_not(part, details)
        if why:
            return result.unable(part.name, why)
        return run_part(part, replace(self.setting, details=details), seconds)

    def _announce(self, chosen: list[parts.Chosen]) -> None:
        print("\n".join(f"  {line}" for line in summary.facts_lines(self.facts)), flush=True)
        for part, details in chosen:
            why = self._why_not(part, details)
            if why:
                print(f"  cannot run: {part.name}: {why}", flush=True)

    def _why_not(self, part: parts.Part, details: tuple[str, ...]) -> str | None:
        needed = part.needs_of(details, self.setting.tiny, self.setting.device)
        return needs.why_not(needed, self.facts)

    @property
    def folder(self) -> Path:
        """Of the summary alone."""
        return self.setting.out / self.name

    def _write(self) -> None:
        details = self.setting.out / "details" / self.name
        summary.write(self.title, self.results, self.facts, self.folder, details)


def run_part(part: parts.Part, setting: Setting, seconds: float) -> dict:
    """The part's result, however it ends."""
    if seconds < SECONDS_MIN:
        return result.unable(part.name, f"{max(0.0, seconds):.0f} s are left of --seconds")
    try:
        command = part.command(setting, seconds)
    except CannotRun as error:
        return result.unable(part.name, str(error))
    environment = setting.paths.environment()
    environment["PYTHONPATH"] += f":{HERE.parent}"
    ended = limits.run(command, seconds, environment, setting.paths.root)
    is_judged = not (setting.tiny and part.needs_size)
    found = result.of(part.name, ended, seconds, part.read, is_judged)
    return {**found, "command": " ".join(command)}
