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
from collections.abc import Mapping

from . import __version__, _native


def environment(now: Mapping[str, str]) -> dict[str, str]:
    """Returns ``now`` with the preload library, before others that are preloaded already."""
    library = _native.library_path()
    preload = str(_native.preload_path())
    others = [path for path in now.get("LD_PRELOAD", "").replace(":", " ").split() if path != preload]
    # The preload library loads the libdormouse next to it; another copy would be a second runtime.
    return {**now, "LD_PRELOAD": ":".join([preload, *others]), "DORMOUSE_LIB": str(library)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dormouse", description=__doc__.partition(":")[2].partition("\n")[0].strip()
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
    command = [sys.executable, *options.script]
    os.execve(sys.executable, command, environment(os.environ))


if __name__ == "__main__":
    main()
