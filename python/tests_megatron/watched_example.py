"""One rank of the shared example, which then prints what it shared.

``torchrun ... watched_example.py SCRIPT``
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(script: Path) -> None:
    # As if the script was started by itself.
    sys.path.insert(0, str(script.parent))
    sharing = runpy.run_path(str(script), run_name="__main__")["forward_backward_func"].sharing
    print(f"rank {os.environ['RANK']}: {sharing.prompts} prompts of {sharing.rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
