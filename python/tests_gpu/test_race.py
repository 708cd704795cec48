"""Threads call torch's entry points while another creates and destroys the runtime: in C, so that
no interpreter's lock orders them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from conftest import SCRIPT_SECONDS_MAX, standin_only

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/c/race_torch.c"
RUNTIMES = 40


@standin_only("the CPU writes to blocks")
def test_runtimes_come_and_go_while_torch_allocates(tmp_path):
    libraries = Path(os.environ["DORMOUSE_LIB"]).parent
    program = tmp_path / "race_torch"
    flags = ["-std=gnu99", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    paths = ["-I", ROOT / "ffi/include", "-L", libraries, f"-Wl,-rpath,{libraries}"]
    subprocess.run(["cc", *flags, *paths, "-o", program, SOURCE, "-ldormouse"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ended = subprocess.run(
        [program, tmp_path, str(RUNTIMES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS_MAX,
        check=False,
    )
    said = f"{ended.stdout}\n{ended.stderr}"
    assert ended.returncode == 0 and not ended.stderr, said
    assert "race_torch: all checks passed" in ended.stdout, said
    assert int(re.search(r"allocated (\d+)", ended.stdout)[1]) > 10 * RUNTIMES, said
