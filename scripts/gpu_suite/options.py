"""The command line of the suite."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from . import facts, parts, plan

GIB = 1 << 30
# Left on a disk beside the file of the file tier.
DISK_RESERVE_BYTES = 2 * GIB
NVME_GIB = 32
ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: list[str] | None, description: str) -> argparse.Namespace:
    """The options. ``chosen``: the parts to run. ``limit``: their seconds, by name. ``shares``:
    those that may take what the parts before them left. ``name`` and ``title``: of the summary."""
    parser = argparse.ArgumentParser(
        prog="gpu-suite",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--plan", type=int, choices=plan.PLANS, help="a command of the plan of record"
    )
    parser.add_argument("--list", action="store_true", help="the parts, and their limits")
    parser.add_argument("--only", type=_names, default=[], help="these parts alone")
    parser.add_argument("--skip", type=_names, default=[], help="all but these")
    parser.add_argument("--seconds", type=float, help="for all of them together")
    parser.add_argument(
        "--limit", type=_limit, action="append", default=[], help="PART=SECONDS, for one"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")),
        help="(default: $OUT, else gpu-results)",
    )  # fmt: skip
    parser.add_argument("--bundle", type=Path, default=ROOT, help="(%(default)s)")
    parser.add_argument("--lib", type=Path, help="libdormouse.so (default: the bundle's)")
    parser.add_argument("--gpu-check", type=Path, help="gpu-check (default: the bundle's)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--device", default="cuda", help="of demo and headline (%(default)s)")
    parser.add_argument("--host-gib", type=float, help="host tier (default: most of what is free)")
    parser.add_argument("--layers", type=int, help="of the headline's model (default: all that fit)")
    parser.add_argument(
        "--microbatch-tokens", type=int, help="rows of the headline's microbatches (default: 4096)"
    )
    parser.add_argument("--nvme-dir", type=Path, help="a disk, for the frontier's file tier")
    parser.add_argument("--nvme-gib", type=int, help=f"of its file (default: {NVME_GIB})")
    asked = parser.parse_args(arguments)
    asked.limit, asked.shares = dict(asked.limit), frozenset()
    asked.out = asked.out.resolve()
    asked.name, asked.title = "parts", "Parts of the GPU suite"
    if asked.plan is not None and (asked.only or asked.skip):
        parser.error("--plan names its parts; accepted: --plan without --only and --skip")
    if asked.nvme_gib is not None and asked.nvme_dir is None:
        parser.error(f"--nvme-gib {asked.nvme_gib} has no disk; accepted: with --nvme-dir")
    asked.nvme_gib = NVME_GIB if asked.nvme_gib is None else asked.nvme_gib
    why = nvme_refused(asked.nvme_dir, asked.nvme_gib)
    if why:
        parser.error(why)
    try:
        asked.chosen = parts.choose(asked.only, asked.skip)
    except ValueError as error:
        parser.error(str(error))
    if asked.plan is not None:
        title, steps = plan.PLANS[asked.plan]
        asked.name, asked.title = f"plan-{asked.plan}", f"Plan {asked.plan}: {title}"
        asked.chosen = [parts.parsed(text) for text, _ in steps]
        own = {parts.parsed(text)[0].name: each for text, each in steps}
        asked.shares = frozenset(own.keys() - asked.limit.keys())
        asked.limit = own | asked.limit
        asked.seconds = asked.seconds or plan.SECONDS_MAX
    return asked


def nvme_refused(folder: Path | None, gib: int) -> str | None:
    """A sentence if the file tier does not fit its disk."""
    if folder is None:
        return None
    free = facts.free_disk(folder) or 0
    most = max(0, free - DISK_RESERVE_BYTES) // GIB
    if gib <= most:
        return None
    return f"--nvme-gib {gib}: {folder} has {free / GIB:.1f} GiB free; accepted: at most {most}"


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    with contextlib.suppress(ValueError):
        if name in parts.BY_NAME:
            return name, float(seconds)
    accepted = ", ".join(parts.BY_NAME)
    raise argparse.ArgumentTypeError(f"{text!r}; accepted: PART=SECONDS with PART of {accepted}")
