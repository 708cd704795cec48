"""Waiting for what processes leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import failing
from failing import BEGIN_S_MAX, appears, leave


def test_a_file_that_is_left_appears(tmp_path: Path) -> None:
    leave(tmp_path, "failed")
    assert appears(tmp_path / "failed", BEGIN_S_MAX, [])


def test_a_file_may_be_left_last(tmp_path: Path) -> None:
    path = tmp_path / "heard.0"

    class Ending:
        """Leaves the file and ends after it was looked for."""

        def poll(self) -> int:
            path.touch()
            return 0

    assert appears(path, BEGIN_S_MAX, [Ending()])


def test_nobody_waits_for_a_process_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "failed"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        # A loop that went on waiting would find the file.
        monkeypatch.setattr(failing.time, "sleep", lambda seconds: path.touch())
        assert not failing.appears(path, BEGIN_S_MAX, [ended])


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    assert not appears(tmp_path / "failed", 0, [])
