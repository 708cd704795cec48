"""The GPU suite: which parts run, on what machine, for how long, from where."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from dormouse.headline import shapes
from gpu_suite import (
    bundle,
    cli,
    commands,
    facts,
    needs,
    options,
    parts,
    paths,
    place,
    plan,
    summary,
)
from suite_fakes import FACTS, ROOT, ROW, fake, lives, python, says, setting

# Choice.


def test_all_parts_in_their_order_unless_some_are_named():
    assert [part for part, _ in parts.choose([], [])] == list(parts.PARTS)
    chosen = parts.choose(["copies", "conformance"], [])
    assert [part.name for part, _ in chosen] == ["conformance", "copies"]
    assert "copies" not in [part.name for part, _ in parts.choose([], ["copies"])]


def test_details_go_to_their_part():
    ((part, details),) = parts.choose(["headline:10k/2k:32", "headline:6k/6k"], [])
    assert (part.name, details) == ("headline", ("10k/2k:32", "6k/6k"))
    library = paths.Paths(ROOT, Path("lib.so"), None)
    chosen = commands.Setting(library, False, "cuda", ROOT, 1.5, Path("/disk"), 2, details)
    command = part.command(chosen, 100)
    assert command[command.index("--host-bytes") + 1] == str(3 << 29)
    assert command[command.index("--cells") + 1] == "10k/2k:32,6k/6k"
    assert command[command.index("--seconds") + 1] == "85"
    assert "--nvme-dir" not in command
    assert "--layers" not in command
    command = part.command(replace(chosen, layers=8, microbatch_tokens=8192), 100)
    assert command[command.index("--layers") + 1] == "8"
    assert command[command.index("--microbatch-tokens") + 1] == "8192"
    command = parts.BY_NAME["frontier"].command(replace(chosen, details=()), 9)
    assert command[command.index("--nvme-bytes") + 1] == str(2 << 30)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "copys"], "no part 'copys'; accepted: place, conformance"),
        (["--skip", "x"], "no part 'x'"),
        (["--only", "copies:4"], "accepted: copies"),
        (["--limit", "copies=soon"], "accepted: PART=SECONDS"),
        (["--plan", "4"], "invalid choice: 4"),
        (["--plan", "1", "--only", "copies"], "accepted: --plan without --only"),
        (["--nvme-dir", "/", "--nvme-gib", "99999999"], "GiB free; accepted: at most"),
        (["--nvme-gib", "8"], "--nvme-gib 8 has no disk; accepted: with --nvme-dir"),
    ],
)
def test_what_is_not_accepted_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Plans.


def test_each_plan_begins_with_the_place_and_ends_in_time():
    assert list(plan.PLANS) == [1, 2, 3]
    for number, (title, steps) in plan.PLANS.items():
        asked = options.parse(["--plan", str(number)], "")
        assert asked.chosen[0][0].name == parts.PLACE
        assert [part.name for part, _ in asked.chosen] == list(asked.limit)
        assert sum(seconds for _, seconds in steps) <= asked.seconds == plan.SECONDS_MAX == 555
        assert asked.title.endswith(title)
        assert asked.name == f"plan-{number}"


def test_the_plans_have_every_part_and_both_cells_of_record():
    chosen = [
        each for number in plan.PLANS for each in options.parse(["--plan", str(number)], "").chosen
    ]
    assert {part.name for part, _ in chosen} == set(parts.BY_NAME)
    cells = [detail for _, details in chosen for detail in details]
    assert [str(cell) for cell in shapes.choose(cells)] == [
        "10k/2k N=2 eager",
        *map(str, shapes.HEADLINE),
    ]


@pytest.mark.parametrize(
    ("options", "second"),
    [(["--plan", "1"], 50.0), (["--plan", "1", "--limit", "other=20"], 20.0), ([], 20.0)],
)
def test_what_a_step_of_a_plan_leaves_goes_to_the_next(options, second, monkeypatch, tmp_path):
    """The first has 30 of 60 s and takes 5; the last keeps its 5."""
    clock = [0.0]
    had = {}

    def run_part(part, setting, seconds):
        had[part.name] = seconds
        clock[0] += 5.0
        return {"part": part.name, "status": "held", "seconds": 5.0, "rows": [], "why": ""}

    steps = (("first", 30), ("other", 20), ("last", 5))
    made = tuple(replace(fake("", seconds), name=name) for name, seconds in steps)
    monkeypatch.setattr(parts, "PARTS", made)
    monkeypatch.setattr(parts, "BY_NAME", {part.name: part for part in made})
    monkeypatch.setattr(plan, "PLANS", {1: ("title", steps)})
    monkeypatch.setattr(plan, "SECONDS_MAX", 60)
    monkeypatch.setattr(cli.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cli, "run_part", run_part)
    assert cli.main([*options, "--out", str(tmp_path)]) == 0
    is_plan = "--plan" in options
    assert had == {"first": 35.0 if is_plan else 30, "other": second, "last": 50.0 if is_plan else 5}


# The place.

STANDIN = FACTS | {"driver": FACTS["driver"] | {"name": "a stand-in GPU"}}


def test_tiny_parts_on_the_standin_hold_cannot_run_or_are_not_judged():
    """What a bar asks of a part that runs there: bytes, order and counts, no arithmetic."""
    kinds = {
        part.name: "cannot run"
        if needs.why_not(part.needs_of((), True, "cuda"), STANDIN)
        else "reported" if part.needs_size else "judged"
        for part in parts.PARTS
    }  # fmt: skip
    computing = ("kernels", "attention", "demo", "headline", "frontier")
    assert {name for name, kind in kinds.items() if kind == "cannot run"} == set(computing)
    assert [name for name, kind in kinds.items() if kind == "reported"] == ["copies"]


@pytest.mark.parametrize(
    ("tiny", "needs_size", "status"),
    [(True, True, "held"), (True, False, "missed"), (False, True, "missed")],
)
def test_sizes_that_say_nothing_have_no_bars(tiny, needs_size, status):
    missed = fake(says({"row": ROW | {"ours": 3.0}}), needs_size=needs_size)
    found = cli.run_part(missed, replace(setting(), tiny=tiny), 30.0)
    assert (found["status"], found["rows"][0]["ours"]) == (status, 3.0)
    assert (found["rows"][0]["bar"] is None) is (status == "held")


def test_on_the_cpu_the_model_needs_no_gpu():
    none = FACTS | {"driver": {"why": "no NVIDIA driver"}, "torch_gpu_why": "torch finds no GPU"}
    for part in parts.PARTS:
        cannot = needs.why_not(part.needs_of((), True, "cpu"), none) is not None
        assert cannot is (part.name not in ("place", "demo", "headline")), part.name
    lacking = none | {"packages": FACTS["packages"] | {"transformers": None}}
    assert needs.why_not(parts.BY_NAME["demo"].needs_of((), True, "cpu"), lacking)


def test_the_place_tells_what_sizes_follow_from():
    found = {
        "driver": {
            "name": "H200",
            "driver": "580.1",
            "total_bytes": 141 << 30,
            "link_width": "8",
            "link_width_max": "16",
            "link_generation": "5",
            "link_generation_max": None,
        },
        "gpu_free_bytes": 140 << 30,
        "host_free_bytes": 120 << 30,
        "host_budget_bytes": 90 << 30,
        "locked_memory_limit_bytes": 8 << 30,
        "free_disk_bytes": {"results": 5 << 30, "file tier": None},
        "headline_layers": 32,
    }
    made = {each["name"]: each for each in place.figures(found)}
    assert {name: each["ours"] for name, each in made.items()} == {
        "GPU memory free": 140,
        "link width": 8,
        "host memory free": 120,
        "locked memory allowed": 8,
        "disk free, results": 5,
        "disk free, file tier": None,
        "headline: layers that fit, of 32": 32,
    }
    lanes = {"most": 16, "generation": 5, "most generation": None}
    assert made["link width"]["peers"] == lanes
    assert made["GPU memory free"]["peers"] == {"total": 141}
    assert made["host memory free"]["peers"] == {"host tier": 90}
    assert not [name for name, each in made.items() if each["met"] is not None]


def test_the_place_gathers_what_the_summary_and_the_parts_read(capsys):
    assert place.main(str(ROOT), f"results={ROOT}") == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = printed[0]["detail"]
    assert FACTS.keys() - {"gpu_free_bytes", "host_free_bytes"} <= found.keys()
    assert found["driver"].keys() >= FACTS["driver"].keys()
    assert {"torch_cuda", "cudnn", "locked_memory_limit_bytes"} <= found.keys()
    assert found["packages"]["torch"] and found["packages"].keys() >= FACTS["packages"].keys()
    assert found["compiler"], "these tests are built with one"
    assert found["free_disk_bytes"]["results"] > 0


def test_an_old_driver_is_said_before_anything_else(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(facts, "driver", lambda: {"cuda": [12, 2]})
    monkeypatch.setattr(parts, "PARTS", (fake(says({"row": ROW})),))
    cli.main(["--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith("The driver supports CUDA 12.2; ")


COMPILED_CELL = ("10k/2k:32:compiled",)


@pytest.mark.parametrize(
    ("part", "details", "changes", "why"),
    [
        ("conformance", (), {"driver": {"why": "no NVIDIA driver: x"}}, "no NVIDIA driver"),
        ("kernels", (), {"driver_too_old": "The driver supports CUDA 12.2"}, "CUDA 12.2"),
        ("modes", (), {"packages": {"torch": None}}, "no torch"),
        ("tests", (), {"torch_gpu_why": "torch finds no GPU"}, "torch finds no GPU"),
        ("demo", (), {"packages": FACTS["packages"] | {"transformers": None}}, "no transformers"),
        ("headline", COMPILED_CELL, {"compiler": None}, "no C compiler"),
        ("headline", COMPILED_CELL, {"packages": FACTS["packages"] | {"triton": None}}, "triton"),
        ("headline", ("10k/2k:32:eager",), {"compiler": None}, None),
        ("headline", (), {"gpu_free_bytes": 3 << 29}, "1.5 GiB of the GPU's memory"),
        ("frontier", (), {"host_free_bytes": 1 << 30}, "1.0 GiB of host memory"),
        ("memcheck", (), {"sanitizer": None}, "compute-sanitizer"),
        ("sleep", (), {"driver_too_old": "old"}, None),
        ("attention", (), {"driver": FACTS["driver"] | {"name": "a stand-in"}}, "computes nothing"),
        ("kernels", (), {"driver": FACTS["driver"] | {"name": "a stand-in"}}, "computes nothing"),
    ],
)
def test_what_a_machine_lacks_is_said_before_a_part_starts(part, details, changes, why):
    needed = parts.BY_NAME[part].needs_of(details, False, "cuda")
    assert needs.why_not(needed, FACTS) is None
    assert needs.why_not(needed, {}) is None
    found = needs.why_not(needed, FACTS | changes)
    assert (found is None) if why is None else (why in found)


def test_an_older_driver_than_the_kernels_need_is_one_sentence():
    report = json.loads((ROOT / needs.KERNELS_REPORT).read_text())
    code = facts.major_minor(report["toolkit"])
    assert report["ptx"]["version"] == "7.0", "else the versions below are others"
    for cuda in (None, code, [code[0] + 1, 0]):
        assert needs.older_driver(cuda, ROOT) is needs.driver_too_old(cuda, ROOT) is None
    for cuda in ([11, 0], [12, 8]):
        said = needs.older_driver(cuda, ROOT)
        assert said.startswith(f"The driver supports CUDA {cuda[0]}.{cuda[1]}; dormouse's machine")
        assert (
            f"(driver {needs.SERIES[tuple(code)]}) and newer, so its kernels run from PTX 7.0"
            in said
        )
        assert needs.driver_too_old(cuda, ROOT) is None
    said = needs.driver_too_old([10, 2], ROOT)
    assert said == needs.older_driver([10, 2], ROOT)
    assert "no kernel runs" in said


def test_a_part_that_cannot_run_is_announced_and_not_started(monkeypatch, tmp_path, capsys):
    place = fake(says({"detail": {"driver": {"why": "no NVIDIA driver"}}}, {"row": ROW}))
    other = fake("raise SystemExit(3)", needs=("gpu",))
    made = (replace(place, name=parts.PLACE), replace(other, name="other"))
    monkeypatch.setattr(parts, "PARTS", made)
    cli.main(["--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "cannot run: other: no NVIDIA driver" in out
    written = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert [each["status"] for each in written["parts"]] == ["held", "cannot_run"]
    assert written["place"] == {"driver": {"why": "no NVIDIA driver"}}


def test_only_settings_that_change_what_is_measured_are_told():
    told = facts.variables({"HOME": "/x", "DORMOUSE_LOG": "1", "CUDA_VISIBLE_DEVICES": "0"})
    assert told == {"CUDA_VISIBLE_DEVICES": "0", "DORMOUSE_LOG": "1"}


def test_the_fields_of_nvidia_smi_may_be_missing():
    assert facts.fields_of("580.95, 5, 5, 16, 16, 700.00") == [
        "580.95",
        "5",
        "5",
        "16",
        "16",
        "700.00",
    ]
    assert facts.fields_of("580.95, [N/A], 5, , 16, 700.00")[1:4] == [None, "5", None]
    assert facts.fields_of(None) == facts.fields_of("No devices") == [None] * len(facts.GPU_FIELDS)


# The whole.


def test_results_are_written_part_by_part(monkeypatch, tmp_path, capsys):
    made = (
        fake(says({"row": ROW})),
        parts.Part("other", "", 30, lambda setting, seconds: python("raise SystemExit(3)")),
    )
    monkeypatch.setattr(parts, "PARTS", made)
    assert cli.main(["--out", str(tmp_path), "--seconds", "60"]) == 1
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "summary.json",
        "summary.md",
    ]
    written = json.loads((tmp_path / "parts" / "summary.json").read_text())["parts"]
    assert [each["status"] for each in written] == ["held", "failed"]
    assert tuple(written[0]) == summary.PART_KEYS
    details = json.loads((tmp_path / "details" / "parts" / "fake.json").read_text())
    assert details["command"].startswith(sys.executable)
    assert {key: details[key] for key in summary.PART_KEYS} == written[0]
    assert "2 parts: 1 held, 1 failed" in capsys.readouterr().out


def test_a_terminated_suite_ends_its_part(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
from gpu_suite import cli, parts
sleeper = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(99)"
command = lambda setting, seconds: [sys.executable, "-c", sleeper]
parts.PARTS = (parts.Part("sleeper", "", 90, command),)
cli.main(["--bundle", {str(tmp_path)!r}, "--out", {str(tmp_path)!r}])
"""
    suite = subprocess.Popen(python(code), stdout=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    end = time.monotonic() + 30
    while not (pid.is_file() and pid.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.05)
    suite.send_signal(signal.SIGTERM)
    assert suite.wait(30) == 128 + signal.SIGTERM
    assert not lives(int(pid.read_text()))


# Places.


def test_a_bundle_is_found_before_a_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("DORMOUSE_LIB", raising=False)
    checkout, packed = tmp_path / "target" / "release", tmp_path / "lib"
    for folder in (checkout, packed):
        folder.mkdir(parents=True)
        (folder / paths.LIBRARY).write_bytes(b"")
    assert paths.Paths.find(tmp_path).library == packed / paths.LIBRARY
    (packed / paths.LIBRARY).unlink()
    found = paths.Paths.find(tmp_path)
    assert found.library == checkout / paths.LIBRARY
    assert found.gpu_check is None
    assert found.environment()["DORMOUSE_LIB"] == str(found.library)
    assert found.environment()["PYTHONPATH"].startswith(str(tmp_path / "python"))


def test_the_sanitizer_is_found_in_a_toolkit(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / paths.SANITIZER
    tool.parent.mkdir()
    tool.write_text("")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert paths.compute_sanitizer() == tool


def test_a_bundle_holds_what_it_needs_and_says_what_it_lacks(tmp_path):
    with pytest.raises(bundle.CannotPack, match="libdormouse.so"):
        bundle.make(ROOT, tmp_path / "nothing", tmp_path / "out")
    builds = tmp_path / "builds"
    builds.mkdir()
    for name in bundle.BINARIES:
        (builds / name).write_bytes(Path(sys.executable).resolve().read_bytes())
    packed = bundle.make(ROOT, builds, tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert packed == (tmp_path / "out").with_suffix(".tar.gz")
    for needed in (
        "scripts/gpu-suite",
        "lib/libdormouse.so",
        "bin/gpu-check",
        "python/dormouse/headline/cli.py",
        "python/tests_gpu/conftest.py",
        "examples/rollouts/trace.json",
        "vendor/pytest/__init__.py",
    ):
        assert needed in names, needed
    assert not [name for name in names if "__pycache__" in name]
