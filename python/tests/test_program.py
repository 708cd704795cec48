"""``python -m dormouse``, the package's version, and the warning of a step in which nothing slept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dormouse
from dormouse import _native as native
from dormouse.__main__ import environment, interpreter_flags

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 120
STEP = """
import sys, warnings
import torch
from models import group, tiny
import dormouse
from dormouse.hf import SharedPrefix

runtime = dormouse.Runtime(nvme_dir=sys.argv[1], nvme_file_bytes=64 << 20)
shared = SharedPrefix(tiny(hidden_size=192), runtime, sleep="awake" not in sys.argv)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        report = shared.backward(group(prompt=256), lambda logits, labels, i: logits.sum() * 1e-3)
print(report.prefix["asleep_bytes_peak"])
for each in caught:
    if "nothing slept" in str(each.message):
        print(each.message)
"""


def run(*arguments: str, preloaded: bool = False, **changes: str) -> subprocess.CompletedProcess:
    """Runs Python without the preload library, unless asked."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'python' / 'tests'}"}
    if not preloaded:
        environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, **changes},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )


def test_the_version_is_that_of_the_workspace():
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert dormouse.__version__ == cargo["workspace"]["package"]["version"]
    told = run("-m", "dormouse", "--version")
    assert told.stdout == f"{dormouse.__version__}\n"


def test_it_says_where_the_libraries_are():
    told = run("-m", "dormouse", "--lib", "--preload")
    lib, preload = map(Path, told.stdout.splitlines())
    assert lib == native.library_path()
    assert preload.is_file() and preload.parent == lib.parent


def test_a_script_runs_under_the_preload_library_with_its_arguments(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['LD_PRELOAD'].split(':')[0].endswith('_preload.so'))\n"
        "print('libdormouse_preload.so' in open('/proc/self/maps').read())\n"
        "sys.exit(7)\n"
    )
    told = run("-m", "dormouse", "run", str(script), "--lib", "-h", "--", "x y")
    assert told.stdout == "['--lib', '-h', '--', 'x y'] True\nTrue\n", told.stderr
    assert told.returncode == 7


def test_a_module_runs_too():
    told = run("-m", "dormouse", "run", "-m", "json.tool", "--help")
    assert "json.tool" in told.stdout and told.returncode == 0


def test_the_flags_of_the_interpreter_are_those_of_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, sys\n"
        "flags = sys.flags.optimize, sys.stdout.write_through, sys.warnoptions\n"
        "print(faulthandler.is_enabled(), *flags, sys.argv[1:])\n"
    )
    flags = ["-u", "-X", "faulthandler", "-W", "error::UserWarning", "-OO"]
    told = run(*flags, "-m", "dormouse", "run", str(script), "-m", "dormouse")
    assert told.stdout == "True 2 True ['error::UserWarning'] ['-m', 'dormouse']\n", told.stderr


@pytest.mark.parametrize(
    ("head", "flags"),
    [
        (["-m", "dormouse"], []),
        (["-mdormouse"], []),
        (["-um", "dormouse"], ["-u"]),
        (["-X", "dev", "-Bumdormouse"], ["-X", "dev", "-Bu"]),
        (["/lib/dormouse/__main__.py"], []),
        (["-u", "/lib/dormouse"], []),
    ],
)
def test_flags_are_told_from_what_runs(head, flags):
    assert interpreter_flags(["python", *head, "run", "a.py"], ["run", "a.py"]) == flags


@pytest.mark.parametrize("place", ["a b", "a:b"])
def test_a_path_that_the_loader_would_split_is_refused(monkeypatch, place):
    monkeypatch.setattr(native, "preload_path", lambda: Path(f"/{place}/libdormouse_preload.so"))
    with pytest.raises(SystemExit, match="splits LD_PRELOAD at spaces and colons"):
        environment({})


def test_other_preloaded_libraries_stay_behind_ours():
    ours = str(native.preload_path())
    assert environment({"LD_PRELOAD": "/a.so /b.so"})["LD_PRELOAD"] == f"{ours}:/a.so:/b.so"
    assert environment({"LD_PRELOAD": f"/a.so:{ours}"})["LD_PRELOAD"] == f"{ours}:/a.so"
    assert environment({"A": "b"}) == {
        "A": "b",
        "LD_PRELOAD": ours,
        "DORMOUSE_LIB": str(native.library_path()),
    }


def test_run_without_a_script_says_what_is_missing():
    told = run("-m", "dormouse", "run")
    assert told.returncode == 2 and "SCRIPT is missing" in told.stderr


@pytest.mark.parametrize(
    "preloaded, told", [(True, ""), (False, "start it by `python -m dormouse run SCRIPT`")]
)
def test_a_step_in_which_nothing_slept_says_so_once(tmp_path, preloaded, told):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = run(str(script), str(tmp_path), preloaded=preloaded)
    assert done.returncode == 0, done.stderr
    asleep, *warned = done.stdout.splitlines()
    assert (int(asleep) > 0) == (not told)
    assert len(warned) == bool(told)
    assert told in "".join(warned)


def test_a_step_that_is_to_stay_awake_warns_of_nothing(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = run(str(script), str(tmp_path), "awake")
    assert done.stdout == "0\n", done.stderr


TAGGED = """
import torch
import dormouse

runtime = dormouse.Runtime()
tag = runtime.tag("replay buffer")
with tag.collect():
    held = torch.ones(40 << 20, dtype=torch.uint8)
"""


def test_the_page_of_an_exit_has_what_the_runtime_knew(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TAGGED)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    settings = {"DORMOUSE_DUMP": "exit", "DORMOUSE_DUMP_DIR": str(dumps)}
    done = run("-m", "dormouse", "run", str(script), **settings)
    assert done.returncode == 0, done.stderr
    (page,) = dumps.iterdir()
    _, _, table = page.read_text().partition("<caption>Largest live blocks</caption>")
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", table.partition("</table>")[0])
    largest = rows[0].split("</td><td>")
    assert (largest[1], largest[4]) == ("replay buffer", "40.0 MiB"), rows[:3]
