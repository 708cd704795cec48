"""The command line that generated and recorded traces share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def chosen(arguments: list[str] | None, names: Iterable[str], doc: str) -> tuple[list[str], Path]:
    """The names a command line asks for, and the folder their files go to."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(names)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--all", action="store_true", help="every one of them")
    parser.add_argument("--out", type=Path, default=HERE, help="folder (default: this one)")
    options = parser.parse_args(arguments)
    wanted = every if options.all else options.names
    unknown = [name for name in wanted if name not in every]
    if unknown or not wanted:
        parser.error(f"trace {unknown[0]!r}" if unknown else f"no trace; accepted: {every}")
    return wanted, options.out
