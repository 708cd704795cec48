"""What a GPU has to show, part by part, each with a time limit and a JSON result.

    scripts/gpu-suite --list
    scripts/gpu-suite --only conformance,copies --out results
    scripts/gpu-suite --only headline:10k/2k:32:eager --seconds 590 --out results

Writes PART.json for each and summary.json with all of them. Ends with 0 where every part that could
run held, with 1 where one did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import sys
import time
from pathlib import Path

from . import limits, parts, result, table
from .paths import Paths

# A part with less than this is not started.
SECONDS_MIN = 5.0
HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen parts; returns the process's exit status."""
    options = _options(arguments)
    if options.list:
        print("\n".join(f"{p.name:<12} {p.seconds:>4} s  {p.what}" for p in parts.PARTS))
        return 0
    # A terminated suite ends its part's processes too, and keeps what it had.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    paths = Paths.find(options.bundle, options.lib, options.gpu_check)
    deadline = time.monotonic() + (options.seconds or math.inf)
    results: list[dict] = []
    for part, details in options.chosen:
        setting = parts.Setting(
            paths, options.tiny, options.device, options.nvme_dir, options.nvme_gib, details
        )
        limit = options.limit.get(part.name, part.seconds)
        found = run_part(part, setting, min(limit, deadline - time.monotonic()))
        results.append(found)
        print("\n".join(table.part(found)), flush=True)
        _write(results, options.out)
    statuses = [found["status"] for found in results]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in result.STATUSES if s in statuses)
    print(f"{len(results)} parts: {counts}; {options.out}/summary.json has everything")
    return int(any(status not in (result.HELD, result.CANNOT_RUN) for status in statuses))


def run_part(part: parts.Part, setting: parts.Setting, seconds: float) -> dict:
    """The part's result, however it ends."""
    if seconds < SECONDS_MIN:
        return result.unable(part.name, f"{max(0.0, seconds):.0f} s are left of --seconds")
    try:
        command = part.command(setting, seconds)
    except parts.CannotRun as error:
        return result.unable(part.name, str(error))
    environment = setting.paths.environment()
    environment["PYTHONPATH"] += f":{HERE.parent}"
    ended = limits.run(command, seconds, environment, setting.paths.root)
    found = result.of(part.name, ended, seconds, part.read)
    return {**found, "command": " ".join(command)}


def _write(results: list[dict], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((results[-1]["part"], results[-1]), ("summary", results)):
        text = json.dumps(_finite(content), indent=1, allow_nan=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _options(arguments: list[str] | None):
    parser = argparse.ArgumentParser(
        prog="gpu-suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the parts, and their limits")
    parser.add_argument("--only", type=_names, default=[], help="these parts alone")
    parser.add_argument("--skip", type=_names, default=[], help="all but these")
    parser.add_argument("--seconds", type=float, help="for all of them together")
    parser.add_argument(
        "--limit", type=_limit, action="append", default=[], help="PART=SECONDS, for one"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="(%(default)s)")
    parser.add_argument("--bundle", type=Path, default=HERE.parents[1], help="(%(default)s)")
    parser.add_argument("--lib", type=Path, help="libdormouse.so (default: the bundle's)")
    parser.add_argument("--gpu-check", type=Path, help="gpu-check (default: the bundle's)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--device", default="cuda", help="of demo and headline (%(default)s)")
    parser.add_argument("--nvme-dir", type=Path, help="a disk, for the frontier's file tier")
    parser.add_argument("--nvme-gib", type=int, default=32, help="of its file (%(default)s)")
    options = parser.parse_args(arguments)
    options.limit = dict(options.limit)
    options.out = options.out.resolve()
    try:
        options.chosen = parts.choose(options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    with contextlib.suppress(ValueError):
        if name in parts.BY_NAME:
            return name, float(seconds)
    accepted = ", ".join(parts.BY_NAME)
    raise argparse.ArgumentTypeError(f"{text!r}; accepted: PART=SECONDS with PART of {accepted}")
