"""Every file and every command of docs/guide.md, run in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from dormouse import _native as native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
SECONDS_MAX = 600

FILE = re.compile(r"`(\w+\.py)`[^`]*?:\n\n```python\n(.*?)^```$", re.M | re.S)
# The commands of a block are lines. "fails": they are to end with an error.
COMMANDS = re.compile(r"^```sh(?P<fails> fails)?\n(?P<lines>.*?)^```$", re.M | re.S)
# The one command that runs in the checkout.
INSTALL = "pip install ."


@dataclass
class Ended:
    """A command of the guide, and how it ended."""

    command: str
    is_to_fail: bool
    status: int
    out: str
    err: str


def environment(folder: Path) -> dict[str, str]:
    """An environment without dormouse; torch and the tools of this one are found behind it."""
    made = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(made, check=True, timeout=SECONDS_MAX)
    # The pip of this environment, for the Python of that one.
    pip = folder / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    ours = ("LD_PRELOAD", "PYTHONPATH")
    bare = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("DORMOUSE_")
    }
    return bare | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        # `pip install .` without a network, and with the libraries that the tests use. Not all that torch and
        # transformers ask for is there: python/requirements.txt leaves out what is not needed.
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(command: str, is_to_fail: bool, folder: Path, variables: dict[str, str]) -> Ended:
    is_install = command == INSTALL
    built = {"DORMOUSE_BUILT": str(native.library_path().parent)} if is_install else {}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT if is_install else folder,
        env=variables | built,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    return Ended(command, is_to_fail, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    for name, text in FILE.findall(GUIDE):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def ended(folder, tmp_path_factory) -> list[Ended]:
    """All commands of the guide, run in their order."""
    variables = environment(tmp_path_factory.mktemp("environment"))
    all_ended = []
    for block in COMMANDS.finditer(GUIDE):
        for line in block["lines"].splitlines():
            command, _, _ = line.partition("#")
            all_ended.append(run(command.strip(), bool(block["fails"]), folder, variables))
    return all_ended


def said(ended: list[Ended], command: str) -> Ended:
    (found,) = [each for each in ended if each.command == command]
    return found


def test_every_command_ends_as_the_guide_says(ended):
    assert len(ended) >= 6
    for each in ended:
        assert (each.status != 0) == each.is_to_fail, f"{each.command}\n{each.out}\n{each.err}"


def test_every_python_block_is_a_file_that_a_command_runs_or_another_imports(ended):
    names = [name for name, _ in FILE.findall(GUIDE)]
    assert len(names) == GUIDE.count("```python\n") == len(set(names))
    text = GUIDE + " ".join(each.command for each in ended)
    for name in names:
        stem = name.removesuffix(".py")
        assert f"from {stem} import" in text or any(name in each.command for each in ended), name


def test_the_shared_step_has_the_plain_steps_gradients_and_sleeps(ended):
    plain = said(ended, "python plain.py").out
    shared = said(ended, "python -m dormouse run shared.py").out
    (norm,) = plain.splitlines()
    assert shared.splitlines()[0] == norm
    asleep, dormant = re.search(r"^asleep: (.*?) of (.*?) that may sleep", shared, re.M).groups()
    assert asleep == dormant and float(asleep.removesuffix(" MiB")) > 100


def test_without_the_preload_library_the_step_says_what_helps(ended):
    alone = said(ended, "python shared.py")
    assert "asleep: 0 B of" in alone.out
    assert alone.err.count("start it by `python -m dormouse run SCRIPT`") == 1


def test_the_report_of_a_step_out_of_memory_has_the_lines_of_the_guide(ended, folder):
    (awake,) = (each for each in ended if each.is_to_fail)
    report, _, traceback = awake.err.partition("Traceback")
    assert "can't allocate memory" in traceback
    lines = report.splitlines()
    assert len(lines) <= 12 and lines[0].startswith("dormouse: out of memory: ")
    for start in re.findall(r"^\| `(\w+)`", GUIDE, re.M):
        assert any(line.strip().startswith(start) for line in lines), start
    pages = list((folder / "dumps").glob("*-oom-*.html"))
    assert len(pages) == 1 and str(pages[0]) in lines[-1]
    assert "peak" in said(ended, "dormouse report dumps/*-oom-*.html").out
    assert pages[0].read_text().startswith("<!")


def test_a_dump_at_exit_is_written_where_it_is_asked_for(ended, folder):
    assert said(
        ended,
        "DORMOUSE_DUMP=oom,exit,signal DORMOUSE_DUMP_DIR=dumps python -m dormouse run shared.py",
    )
    assert len(list((folder / "dumps").glob("*-exit-*.html"))) == 1
