"""``dormouse params`` beside the library's own enumeration."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess

import pytest

from dormouse import _native as native

PROGRAM = native.library_path().with_name("dormouse")
# What a process of this test has of its own.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("DORMOUSE_")}


def program(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
    environment = {**CLEAN, "DORMOUSE_LIB": str(native.library_path()), **changes}
    environment.pop("LD_PRELOAD", None)
    command = [PROGRAM, "params", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def shown(*arguments: str, **changes: str) -> dict[str, dict]:
    told = program("--json", *arguments, **changes)
    assert told.returncode == 0, told.stderr
    return {param["name"]: param for param in json.loads(told.stdout)}


def test_names_and_texts_are_those_of_the_library():
    param = native.Param()
    names = {}
    for index in range(1024):
        param.size, param.version = ctypes.sizeof(param), 1
        if native.library().dormouse_param_get(index, ctypes.byref(param)) != 0:
            break
        names[param.name.decode()] = (param.kind.decode(), param.built_in.decode(), param.accepts.decode())
    seen = shown()
    assert {n: (p["kind"], p["built_in"], p["accepts"]) for n, p in seen.items()} == names
    assert len(names) > 20


def test_each_value_has_its_source(tmp_path):
    file = tmp_path / "file.conf"
    file.write_text("DORMOUSE_OFFLOAD_IO_THREADS = 3\nDORMOUSE_HOST_BUDGET_BYTES = 1GiB\n")
    seen = shown(DORMOUSE_CONFIG=str(file), DORMOUSE_HOST_BUDGET_BYTES="2GiB")
    assert (seen["DORMOUSE_HOST_BUDGET_BYTES"]["value"], seen["DORMOUSE_HOST_BUDGET_BYTES"]["source"]) == (
        str(2 << 30),
        "environment",
    )
    threads = seen["DORMOUSE_OFFLOAD_IO_THREADS"]
    assert (threads["value"], threads["source"]) == ("3", "file")
    assert seen["DORMOUSE_LOG"]["source"] == "built in"


def test_the_file_loads_back(tmp_path):
    settings = {"DORMOUSE_NVME_DIR": str(tmp_path), "DORMOUSE_HOST_BUDGET_BYTES": "123456789", "DORMOUSE_LOG": "info"}
    before = shown(**settings)
    file = tmp_path / "all.conf"
    file.write_text(program("--file", **settings).stdout)
    after = shown(DORMOUSE_CONFIG=str(file))
    for name, param in before.items():
        if name in settings:
            assert (after[name]["value"], after[name]["source"]) == (settings[name], "file")
        elif name not in ("DORMOUSE_CONFIG", "DORMOUSE_LIB"):
            assert f"\n# {name} = " in file.read_text()
            assert after[name]["source"] == param["source"], name


@pytest.mark.parametrize("path", ["/data/run #3", '/a "b" \\c', "/100%%", "/a b/é\n#"])
def test_a_path_loads_back_whatever_it_has(tmp_path, path):
    file = tmp_path / "all.conf"
    file.write_text(program("--file", DORMOUSE_DUMP_DIR=path).stdout)
    after = shown(DORMOUSE_CONFIG=str(file))
    assert after["DORMOUSE_DUMP_DIR"]["value"] == path


def test_a_long_path_is_whole_in_the_file_and_shown_as_cut_elsewhere(tmp_path):
    path = "/data" + "/long" * 300
    text = program("--file", DORMOUSE_DUMP_DIR=path).stdout
    assert f"\nDORMOUSE_DUMP_DIR = {path}\n" in text
    value = shown(DORMOUSE_DUMP_DIR=path)["DORMOUSE_DUMP_DIR"]["value"]
    assert len(value.encode()) == 511 and value.endswith("/lo…")
    assert "/lo…  [environment]" in program(DORMOUSE_DUMP_DIR=path).stdout


def test_automatic_values_have_their_reasons(tmp_path):
    seen = shown(DORMOUSE_NVME_DIR=str(tmp_path), DORMOUSE_OFFLOAD_WINDOW_LAYERS="5")
    numbers = {name: param for name, param in seen.items() if param["kind"] in ("size", "count")}
    automatic = {name: param for name, param in numbers.items() if param["built_in"] == "auto"}
    assert len(automatic) == 6
    window = automatic.pop("DORMOUSE_OFFLOAD_WINDOW_LAYERS")
    assert (window["value"], window["source"], window["reason"]) == ("5", "environment", "")
    for name, param in automatic.items():
        assert param["source"] == "automatic" and param["reason"] and int(param["value"]) > 0, name
    file = automatic["DORMOUSE_NVME_FILE_BYTES"]
    assert "the disk of" in file["reason"], file
    told = program("nvme_file_bytes", DORMOUSE_NVME_DIR=str(tmp_path))
    assert "[automatic: " in told.stdout and "built in  auto" in told.stdout


def test_one_parameter_is_explained_and_a_near_name_suggested():
    told = program("nvme_dir")
    assert told.returncode == 0
    assert told.stdout.startswith("DORMOUSE_NVME_DIR = not set  [built in]\n")
    assert "unlinks it immediately" in told.stdout
    told = program("nvme_directory")
    assert told.returncode == 1
    assert told.stderr.startswith("dormouse: nvme_directory is no parameter; accepted: DORMOUSE_NVME_DIR")


def test_a_refused_value_is_named():
    told = program(DORMOUSE_HOST_BUDGET_BYTES="much")
    assert told.returncode == 1
    assert "DORMOUSE_HOST_BUDGET_BYTES" in told.stderr and "much" in told.stderr


def test_another_library_is_refused():
    told = program("--lib", "libm.so.6")
    assert told.returncode == 1
    assert "dormouse_param_get" in told.stderr
