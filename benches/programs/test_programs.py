"""What the battery itself is made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from program_rows import Found, Glibc
from programs import PROGRAMS, Program
from running import TIMED_OUT, Result, build, difference, run


@pytest.fixture(scope="module", autouse=True)
def drivers() -> None:
    build()


def result(status: int = 0, output: str = "", cpu: float = 1.0, peak: int = 100) -> Result:
    return Result(status, output, "", cpu, peak)


def test_addresses_and_times_are_no_difference() -> None:
    ours, theirs = result(output="at 0x7f00 in 1.5 s\n"), result(output="at 0xabcd in 22 s\n")
    assert difference(ours, theirs, "") is None
    longer = result(output="at 0x7f00 in 1 min 7 sec\n")
    assert difference(ours, longer, "") is None


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (result(-11, "a\n"), "status -11"),
        (result(0, "b\n"), "prints 'b'"),
        (result(0, "a\nb\n"), "prints 2 lines"),
        (result(0, ""), "prints 0 lines"),
    ],
)
def test_other_results_are_told(ours: Result, told: str) -> None:
    assert told in difference(ours, result(0, "a\n"), "")


def test_a_run_has_the_status_of_its_program() -> None:
    assert run(["sh", "-c", "echo out; exit 3"], []).status == 3
    assert run(["sh", "-c", "kill -SEGV $$"], []).status == -11


def test_settings_reach_the_program_alone() -> None:
    assert run(["sh", "-c", "echo $A"], ["A=b"]).output == "b\n"


def test_a_hung_program_is_ended() -> None:
    assert run(["sleep", "100"], [], seconds_max=0.5).status == TIMED_OUT


def test_a_grandchild_is_counted_and_the_bench_itself_is_not() -> None:
    held = bytearray(256 << 20)
    held[::4096] = b"x" * len(held[::4096])
    small = run(["true"], [])
    assert small.peak_bytes < 64 << 20
    program = "x = b'x' * (200 << 20)"
    tree = run(["sh", "-c", f'"{sys.executable}" -c "{program}" & wait; true'], [])
    assert tree.peak_bytes > 200 << 20


def test_rows_count_failures_and_what_did_not_run() -> None:
    found = Found()
    good = Glibc(result(cpu=2.0, peak=200), {"peer": result(cpu=5.0, peak=300)})
    found.add(Program("good", []), [(result(cpu=3.0, peak=400), good)])
    found.add(Program("bad", []), [(result(1), Glibc(result(0)))])
    found.add(Program("broken", []), [(result(1), Glibc(result(1)))])
    rows = {row.name: row for row in found.rows()}
    assert (rows["programs_failed"].ours, rows["programs_failed"].met) == (1, False)
    assert rows["programs_missing"].ours == 1
    cpu, rss = rows["cpu_over_glibc_worst"], rows["rss_over_glibc_worst"]
    assert (cpu.ours, rss.ours) == (1.5, 2.0)
    assert (cpu.peers, rss.peers) == ({"peer": 2.5}, {"peer": 1.5})


def test_a_program_that_fails_under_a_peer_has_no_figure_there() -> None:
    found = Found()
    glibc = Glibc(result(cpu=2.0), {"peer": result(-11, cpu=0.1)})
    found.add(Program("p", []), [(result(cpu=3.0), glibc)])
    rows = {row.name: row for row in found.rows()}
    assert (rows["cpu_over_glibc_worst"].ours, rows["cpu_over_glibc_worst"].peers) == (1.5, {})


def test_a_battery_of_nothing_is_no_success() -> None:
    assert {row.met for row in Found().rows() if row.bar is not None} == {False}


def test_a_program_that_is_not_installed_is_missing() -> None:
    assert Program("p", [], "package", ("no-such-program",)).missing().startswith("missing: package")


def test_names_of_programs_are_unique() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
