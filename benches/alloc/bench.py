#!/usr/bin/env python3
"""Caching GPU allocators side by side, on a machine without a GPU.

    .venv/bin/python benches/alloc/bench.py                               # all rows
    .venv/bin/python benches/alloc/bench.py --only hot_pair_instructions  # one
    .venv/bin/python benches/alloc/bench.py --only 'churn_*' --contenders ours
    .venv/bin/python benches/alloc/bench.py --profile hot                 # where instructions go
    .venv/bin/python benches/alloc/bench.py --profile churn_1000

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import runs
from contenders import ALL, ROOT, TARGET, Contender, Unavailable
from measure import makers
from rows import forget, table, write
from setting import Setting, Sizes, hot_arguments

OUT = TARGET / "bench" / "alloc.json"
TRACES = ROOT / "benches" / "traces"


def main() -> int:
    arguments = parse()
    contenders = chosen(arguments.contenders)
    sizes = Sizes(arguments.min_bytes, arguments.max_bytes, arguments.seed)
    setting = Setting(sizes, contenders)
    if arguments.profile:
        print(profile(setting, contenders[0], arguments.profile))
        return 0
    known = makers(arguments.traces)
    patterns = arguments.only.split(",")
    names = [name for name in known if any(fnmatch(name, pattern) for pattern in patterns)]
    if not names:
        print(f"no row is called {arguments.only}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    # A part of the contenders is for a look: the file is of all of them.
    is_kept = contenders == ALL
    if is_kept and len(names) == len(known):
        arguments.out.unlink(missing_ok=True)
    elif is_kept:
        forget(names, arguments.out)
    rows = []
    for name in names:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        rows.append(known[name](setting, name))
        # Written as they come: a run that is ended early keeps what it has.
        if is_kept:
            write(rows, arguments.out)
    print(table(rows))
    return 0


def profile(setting: Setting, contender: Contender, what: str) -> str:
    if what == "hot":
        return runs.profile(contender, *hot_arguments())
    live = int(what.removeprefix("churn_"))
    return runs.profile(contender, *setting.churn_arguments(live))


def chosen(names: str) -> tuple[Contender, ...]:
    known = {contender.name: contender for contender in ALL}
    wanted = names.split(",") if names else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no contender is called {unknown[0]}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="rows, comma-separated; * and ? match")
    parser.add_argument("--contenders", default="", help="comma-separated; all unless given")
    parser.add_argument("--min-bytes", type=int, default=Sizes.min_bytes, help="of churned blocks")
    parser.add_argument("--max-bytes", type=int, default=Sizes.max_bytes, help="of churned blocks")
    parser.add_argument("--seed", type=int, default=Sizes.seed, help="of churned blocks' sizes")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of traces to replay")
    parser.add_argument("--profile", metavar="hot|churn_N", help="callgrind's list of functions")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unavailable as reason:
        sys.exit(f"bench: {reason}")
