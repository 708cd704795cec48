"""``python -m dormouse``: starts a script with the preload library, and says where the libraries are.

::

    python -m dormouse run train.py --epochs 3   # CPU tensors of the script can sleep
    python -m dormouse run -m package.module
    python -m dormouse --lib                     # path of libdormouse.so
    python -m dormouse --preload                 # path of libdormouse_preload.so
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from . import __version__, _native


def environment(now: Mapping[str, str]) -> dict[str, str]:
    """Returns ``now`` with the preload library, before others that are preloaded already."""
    library = _native.library_path()
    preload = str(_native.preload_path())
    if " " in preload or ":" in preload:
        raise SystemExit(
            f"dormouse: the preload library is {preload!r}, and the loader splits LD_PRELOAD at "
            "spaces and colons; accepted: an installation whose path has neither"
        )
    others = [path for path in now.get("LD_PRELOAD", "").replace(":", " ").split() if path != preload]
    # The preload library loads the libdormouse next to it; another copy would be a second runtime.
    return {**now, "LD_PRELOAD": ":".join([preload, *others]), "DORMOUSE_LIB": str(library)}


def interpreter_flags(original: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the flags of ``original``, which runs this module with ``arguments``."""
    *flags, module = original[1 : len(original) - len(arguments)] or [""]
    last = f"{flags.pop()}{module}" if flags and module == __package__ else module
    # -m dormouse, -mdormouse, or behind other letters: -um dormouse.
    if not (last.startswith("-") and last.endswith(f"m{__package__}")):
        return []
    letters = last.removesuffix(f"m{__package__}")
    return [*flags, letters] if letters != "-" else flags


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dormouse",
        description="starts a script with the preload library, and says where the libraries are.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--lib", action="store_true", help="print the path of libdormouse.so")
    parser.add_argument("--preload", action="store_true", help="print that of libdormouse_preload.so")
    commands = parser.add_subparsers(dest="command", metavar="run")
    run = commands.add_parser(
        "run", prefix_chars="\0", help="run SCRIPT, or -m MODULE, under the preload library"
    )
    run.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    options = parser.parse_args()
    if options.lib:
        print(_native.library_path())
    if options.preload:
        print(_native.preload_path())
    if options.command is None:
        if not (options.lib or options.preload):
            parser.print_help()
        return
    if not options.script:
        run.error("SCRIPT is missing; accepted: a Python file, or -m and a module")
    sys.stdout.flush()
    # The script takes this process's place, with its id, so that signals and launchers find it.
    flags = interpreter_flags(sys.orig_argv, sys.argv[1:])
    command = [sys.executable, *flags, *options.script]
    os.execve(sys.executable, command, environment(os.environ))


if __name__ == "__main__":
    main()
