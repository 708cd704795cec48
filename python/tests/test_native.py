"""The ctypes declarations against the C header itself, by the C compiler.

And what ctypes alone would cut, and what an interrupt would leave behind.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dormouse import ArgumentError, DormouseError
from dormouse import _native as native
from dormouse.runtime import Prefix

INCLUDE = Path(__file__).resolve().parents[2] / "ffi" / "include"
HEADER = (INCLUDE / "dormouse.h").read_text()


def test_sizes_and_offsets_are_the_headers(tmp_path):
    lines = []
    for name, struct in native.STRUCTS.items():
        c_name = f"dormouse_{name}_t"
        lines.append(f'printf("{name} %zu\\n", sizeof({c_name}));')
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({c_name}, {field}));')
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "dormouse.h"\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    compiler = shutil.which("cc")
    subprocess.run(
        [compiler, f"-I{INCLUDE}", str(source), "-o", str(tmp_path / "layout")], check=True
    )
    printed = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True)
    layout = dict(line.split() for line in printed.stdout.splitlines())
    for name, struct in native.STRUCTS.items():
        assert int(layout[name]) == ctypes.sizeof(struct), name
        for field, *_ in struct._fields_:
            assert int(layout[f"{name}.{field}"]) == getattr(struct, field).offset, (name, field)


def test_every_struct_field_of_the_header_is_declared():
    for name, struct in native.STRUCTS.items():
        body = re.search(rf"typedef struct dormouse_{name}_t \{{(.*?)\}} dormouse", HEADER, re.S)
        code = re.sub(r"//[^\n]*", "", body.group(1))
        fields = re.findall(r"(\w+)(?:\[\w+\])?;", code)
        assert fields == [field for field, *_ in struct._fields_], name


def constant(name: str) -> int:
    return int(re.search(rf"#define DORMOUSE_{name} (-?\d+)", HEADER).group(1))


def test_constants_are_the_headers():
    assert constant("STRUCT_VERSION") == native.STRUCT_VERSION
    assert constant("NAME_BYTES") == native.NAME_BYTES
    assert constant("TEXT_BYTES") == native.TEXT_BYTES
    for kind, prefix in ((native.Phase, "PHASE"), (native.Edge, "EDGE"), (native.OpKind, "OP")):
        for member in kind:
            assert constant(f"{prefix}_{member.name}") == member, member
    for names, prefix in (
        (native.TIERS, "TIER"),
        (native.ROLES, "ROLE"),
        (native.COPIES, "COPY"),
        (native.STATES, "STATE"),
        (native.RESIDENCIES, "RESIDENCY"),
    ):
        for value, name in enumerate(names):
            assert constant(f"{prefix}_{name.upper()}") == value, name
    for name, bit in native.MODES.items():
        assert constant(f"MODE_{name.upper()}") == bit
    for name, bit in native.TIER_FLAGS.items():
        assert constant(f"TIER_FLAG_{name.upper()}") == bit
    assert constant("MERGE_ON_GPU") == native.MERGE_ON_GPU
    assert constant("STATS_RESET_PEAKS") == native.STATS_RESET_PEAKS
    assert constant("STATS_BEGIN_INTERVAL") == native.STATS_BEGIN_INTERVAL
    for name in ("OK", "DECLINED", "PARTIAL", "ERR_ARGUMENT", "ERR_BUSY"):
        assert constant(name) == getattr(native, name), name
    short = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
    for name, code in native.DTYPES.items():
        assert constant(f"DTYPE_{short[name]}") == code


def test_every_function_takes_as_many_arguments_as_the_header_says():
    for name, arguments in native._PROTOTYPES.items():
        declared = re.search(rf"dormouse_{name}\(([^;]*)\);", HEADER).group(1)
        assert declared.count(",") + 1 == len(arguments), name


@pytest.mark.parametrize("nbytes", [-1, 1 << 64, (1 << 64) + (1 << 20)])
def test_numbers_that_do_not_fit_are_refused(runtime, nbytes):
    before = runtime.info()["host_budget_bytes"]
    said = f"argument 2 of dormouse_runtime_set_budget is {nbytes}; accepted: 0 to {2**64 - 1}"
    with pytest.raises(ArgumentError, match=re.escape(said)):
        runtime.set_budget("host", nbytes)
    assert runtime.info()["host_budget_bytes"] == before
    with pytest.raises(ArgumentError, match=r"is 4294967297; accepted: 0 to 4294967295"):
        Prefix(runtime, None, layers=(1 << 32) + 1)
    with pytest.raises(ArgumentError, match=r"is -1; accepted: 0 to"):
        runtime.query(-1)


@pytest.mark.parametrize("address", [-1, 1 << 64])
def test_addresses_that_do_not_fit_are_refused(runtime, address):
    with Prefix(runtime, None, layers=1) as node:
        said = f"addresses has {address} at 1; accepted: 0 to {2**64 - 1}"
        with pytest.raises(ArgumentError, match=re.escape(said)):
            node.dormant(0, [4096, address])


def test_text_with_a_nul_is_refused(runtime, tmp_path):
    with pytest.raises(ArgumentError, match=r"name is 'a\\x00b'; accepted: text without NUL"):
        runtime.tag("a\0b")
    with pytest.raises(ArgumentError, match="path is .*without NUL"):
        runtime.dump(tmp_path / "a.html\0.html")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_utf_8_is_refused_as_such(runtime, tmp_path):
    path = tmp_path / os.fsdecode(b"t\xff.html")
    with pytest.raises(ArgumentError, match=r"path is .*t\\xff.html.*accepted: UTF-8"):
        runtime.dump(path)
    assert not path.exists()


def test_what_an_interrupted_call_created_is_closed(runtime, monkeypatch):
    call, created = native.call, []

    def interrupted(name, *arguments):
        call(name, *arguments)
        if name.endswith("_create"):
            created.append(arguments[-1]._obj.value)
            raise KeyboardInterrupt

    monkeypatch.setattr(native, "call", interrupted)
    # Their tracebacks, kept as a debugger would, keep the objects.
    with pytest.raises(KeyboardInterrupt) as _tag:
        runtime.tag("cut short")
    with pytest.raises(KeyboardInterrupt) as _prefix:
        Prefix(runtime, None, layers=1)
    for kind, handle in zip(("tag", "prefix"), created, strict=True):
        with pytest.raises(DormouseError, match="STALE|destroyed"):
            call(f"{kind}_destroy", handle)
