"""Out of memory is torch's own error, on every torch whose exports are known."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from alone import alone
from conftest import SCRIPT_SECONDS_MAX, TORCH, run_script

import dormouse
from dormouse.errors import is_out_of_memory
from dormouse.modes import exports

MIB = 1 << 20


def exhaust() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    return caught.value


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_running_out_is_torchs_own_class_and_can_be_caught_again():
    dormouse.install()
    for _ in range(3):
        error = exhaust()
        assert type(error) is torch.OutOfMemoryError
        assert str(error).startswith("CUDA out of memory. Tried to allocate")
        assert is_out_of_memory(error)
    held = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    assert held.is_cuda, "the process goes on"


@alone()
def test_a_dump_is_written_where_memory_runs_out_and_the_error_names_it():
    with tempfile.TemporaryDirectory() as folder:
        # The warning of the first, which has no directory, is not wanted on standard error.
        os.environ |= {"DORMOUSE_DUMP_DIR": f"{folder}/%h", "RANK": "3", "DORMOUSE_LOG": "off"}
        dormouse.install()
        missing = str(exhaust())
        assert "No dump was written: could not write" in missing, missing
        assert len(missing.splitlines()) <= 12, missing
        directory = Path(folder) / Path("/proc/sys/kernel/hostname").read_text().strip()
        directory.mkdir()
        for _ in range(9):
            error = exhaust()
            assert type(error) is torch.OutOfMemoryError
        names = sorted(path.name for path in directory.iterdir())
        assert str(error).endswith(names[-1])
        stem = f"dormouse-{directory.name}-rank3-pid{os.getpid()}"
        # The first and the last seven.
        kept = [1, *range(3, 10)]
        assert names == [f"{stem}-{number}-oom-cuda0.html" for number in kept]
        page = (directory / names[0]).read_text()
        assert page.lower().startswith("<!doctype html>") and page.rstrip().endswith("</html>")


@alone()
def test_the_error_names_the_dump():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DORMOUSE_DUMP_DIR"] = folder
        dormouse.install()
        error = str(exhaust())
        (page,) = Path(folder).iterdir()
        assert f"The dump shows what held the memory: xdg-open {page}" in error


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_a_pool_writes_a_dump_only_where_torch_finds_no_memory_either():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DORMOUSE_DUMP_DIR"] = folder
        installed = dormouse.install(mode="pool")
        cached = torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")
        del cached
        with installed.pool("weights").use():
            if TORCH <= (2, 11):
                # It keeps what other pools have cached, and does not ask again: no dump.
                with pytest.raises(torch.OutOfMemoryError):
                    torch.empty(180 * MIB, dtype=torch.uint8, device="cuda")
                assert not list(Path(folder).iterdir())
                return
            # torch frees its cache and asks again.
            held = torch.empty(180 * MIB, dtype=torch.uint8, device="cuda")
            assert held.is_cuda and not list(Path(folder).iterdir())
            exhaust()
            assert len(list(Path(folder).iterdir())) == 1


@alone()
def test_the_error_names_the_tags_of_the_request_and_of_the_largest_holders():
    tag = dormouse.install(mode="allocator").runtime.tag("optimizer state")
    with tag.collect():
        held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        error = str(exhaust())
    assert len(error.splitlines()) <= 12, error
    assert 'requested for tag "optimizer state"' in error, error
    assert 'held by tag "optimizer state": 100.0 MiB awake' in error, error
    del held
    tag.close()


@alone()
def test_a_signal_and_the_exit_dump_the_gpu():
    # The test itself runs in a forked process, whose end runs no exit handlers.
    with tempfile.TemporaryDirectory() as folder:
        environment = {"DORMOUSE_DUMP_DIR": folder, "DORMOUSE_DUMP": "signal,exit", "RANK": "2"}
        code = (
            "import os, signal, time, torch, dormouse\n"
            "dormouse.install()\n"
            "held = torch.empty(1 << 20, device='cuda')\n"
            "os.kill(os.getpid(), signal.SIGUSR1)\n"
            f"while not any('-signal-' in name for name in os.listdir({folder!r})):\n"
            "    time.sleep(0.01)\n"
        )
        run_script(code, **environment)
        ends = sorted(path.name.split("-rank2-")[1].split("-", 1)[1] for path in Path(folder).iterdir())
        assert ends == ["0-signal-cuda0.html", "1-exit-cuda0.html"]


@alone()
def test_a_runtime_writes_a_dump_and_returns_its_path():
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"DORMOUSE_DUMP_DIR": folder, "RANK": "2"}
        installed = dormouse.install()
        path = installed.runtime.dump()
        assert path.parent == Path(folder) and path.name.endswith("-0-call-cuda0.html")
        assert path.read_text().rstrip().endswith("</html>")


@alone(DORMOUSE_CPU_BUDGET_BYTES="4 GB")
def test_a_budget_of_the_host_device_is_a_warning_where_only_a_gpu_is_used():
    os.environ["DORMOUSE_LOG_FILE"] = f"{tempfile.mkdtemp()}/log"
    dormouse.install()
    text = Path(os.environ["DORMOUSE_LOG_FILE"]).read_text()
    assert "another kind of device" in text and "DORMOUSE_CUDA_BUDGET_BYTES" in text, text


@alone()
def test_nothing_is_written_unless_a_directory_is_named():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        dormouse.install()
        assert "browser" not in str(exhaust())
        assert not list(Path(folder).iterdir())


@alone()
def test_a_known_torch_is_constructed_as_the_table_says():
    installed = dormouse.install()
    library = exports.native.library()
    found = library.dormouse_torch_get_out_of_memory_construction()
    assert found == exports.VERSIONS[exports.version()]
    assert not [each for each in installed.why if "known versions" in each]


@alone()
def test_an_unknown_torch_says_so_once():
    exports.VERSIONS = {"2.0": exports.OWN}
    said = [each for each in dormouse.install().why if "known versions: 2.0" in each]
    assert len(said) == 1
    assert torch.__version__ in said[0]


# A process without torch has none of its symbols, as one with a torch of other exports. Nothing
# catches the exception, so the C++ runtime says what it is.
WITHOUT_TORCH = f"""
import ctypes, os
ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(os.environ["DORMOUSE_LIB"])
assert library.dormouse_torch_get_out_of_memory_construction() == {exports.RUNTIME_ERROR}
malloc = library.dormouse_torch_malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
assert malloc({MIB}, 0, None)
malloc(1 << 40, 0, None)
"""


def test_the_fallback_is_a_runtime_error_with_torchs_text():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS_MAX,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    thrown, said, *_ = done.stderr.splitlines()
    assert thrown.endswith("instance of 'std::runtime_error'")
    assert said.startswith("  what():  CUDA out of memory. Tried to allocate 1024.00 GiB.")


@alone()
def test_a_torch_without_a_known_constructor_is_told():
    library = exports.native.library()
    library.dormouse_torch_get_out_of_memory_construction = lambda: exports.RUNTIME_ERROR
    (said,) = [each for each in dormouse.install().why if "known versions" in each]
    assert "out-of-memory is a RuntimeError whose text begins with 'CUDA out of memory'" in said


def test_the_fallback_counts_as_out_of_memory_and_other_errors_do_not():
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB."))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(ValueError("CUDA out of memory."))


@alone()
def test_a_dump_without_a_runtime_has_the_largest_blocks_of_the_allocator():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DORMOUSE_DUMP_DIR"] = folder
        dormouse.install()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            held = torch.empty(37 * MIB, dtype=torch.uint8, device="cuda")
        other = torch.empty(21 * MIB, dtype=torch.uint8, device="cuda")
        exhaust()
        (page,) = Path(folder).iterdir()
        _, _, table = page.read_text().partition("<caption>Largest live blocks</caption>")
        rows = re.findall(r"<tr><td>(.*?)</td></tr>", table.partition("</table>")[0])
        rows = [row.split("</td><td>") for row in rows]
        assert [row[4:] for row in rows[:2]] == [
            ["37.0 MiB", f"{held.data_ptr():#x}"],
            ["21.0 MiB", f"{other.data_ptr():#x}"],
        ]
        assert [row[3] for row in rows[:2]] == [f"{stream.cuda_stream:#x}", "0x0"]
