"""``make install``: C projects find, link and run the library below a prefix, by pkg-config and by CMake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dormouse
from dormouse import _native as native

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 120
VERSION = dormouse.__version__
SONAME = f"libdormouse.so.{VERSION.partition('.')[0]}"
FILES = {
    "bin/dormouse",
    "include/dormouse.h",
    f"lib/libdormouse.so.{VERSION}",
    f"lib/{SONAME}",
    "lib/libdormouse.so",
    "lib/libdormouse_preload.so",
    "lib/pkgconfig/dormouse.pc",
    "lib/cmake/dormouse/dormouse-config.cmake",
    "lib/cmake/dormouse/dormouse-config-version.cmake",
    "share/man/man1/dormouse.1",
    "share/bash-completion/completions/dormouse",
    "share/zsh/site-functions/_dormouse",
    "share/fish/vendor_completions.d/dormouse.fish",
    *(f"share/doc/dormouse/{name}" for name in ("LICENSE-APACHE", "LICENSE-MIT", "NOTICE")),
}


def succeed(*command: str | Path, **changes: str) -> str:
    """Runs a command without what names libraries of this checkout; returns its output."""
    ours = ("DORMOUSE_LIB", "LD_PRELOAD", "LD_LIBRARY_PATH", "MAKEFLAGS", "MAKELEVEL")
    bare = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        command, env=bare | changes, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_install(*variables: str) -> None:
    built = native.library_path().parent
    succeed("make", "-C", ROOT, "install", f"DORMOUSE_BUILT={built}", *variables)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    make_install(f"PREFIX={folder}")
    return folder


def pkgconf(prefix: Path, *words: str) -> list[str]:
    search = str(prefix / "lib" / "pkgconfig")
    return succeed(
        sys.executable, "-m", "pkgconf", *words, "dormouse", PKG_CONFIG_PATH=search
    ).split()


def runs(program: Path, prefix: Path, folder: Path) -> None:
    """The example runs linked, and under the preload library with one instance of the library."""
    search = {"LD_LIBRARY_PATH": str(prefix / "lib")}
    needed = succeed("readelf", "-dW", program)
    assert re.findall(r"NEEDED.*\[(libdormouse\S*)\]", needed) == [SONAME]
    assert "memory from dormouse_mem_alloc" in succeed(program, folder, **search)
    preload = str(prefix / "lib" / "libdormouse_preload.so")
    told = succeed(program, folder, LD_PRELOAD=preload, **search)
    assert "memory from malloc (preload)" in told and "every byte came back" in told


def test_it_installs_these_files(prefix):
    assert files(prefix) == FILES
    lib = prefix / "lib"
    assert (lib / "libdormouse.so").readlink() == Path(SONAME)
    assert (lib / SONAME).readlink() == Path(f"libdormouse.so.{VERSION}")
    assert succeed(prefix / "bin" / "dormouse", "--version") == f"dormouse {VERSION}\n"
    assert ".TH dormouse 1" in (prefix / "share/man/man1/dormouse.1").read_text()
    for name in (name for name in FILES if name.startswith("share/") and "doc/" not in name):
        assert "doctor" in (prefix / name).read_text(), name


def test_a_program_built_by_pkg_config_runs(prefix, tmp_path):
    assert pkgconf(prefix, "--modversion") == [VERSION]
    assert pkgconf(prefix, "--variable=preload") == [str(prefix / "lib/libdormouse_preload.so")]
    program = tmp_path / "step"
    words = pkgconf(prefix, "--cflags", "--libs")
    succeed("cc", "-std=c99", "-o", program, ROOT / "examples" / "c" / "step.c", *words)
    runs(program, prefix, tmp_path)


def cmake(folder: Path, prefix: Path, source: Path = ROOT / "examples" / "c") -> str:
    tool = (sys.executable, "-m", "cmake")
    said = succeed(*tool, "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}")
    return said + succeed(*tool, "--build", folder)


def test_a_program_built_by_cmake_runs(prefix, tmp_path):
    cmake(tmp_path / "build", prefix)
    runs(tmp_path / "build" / "step", prefix, tmp_path)


def test_cmake_accepts_the_same_major_version_at_least_as_new(prefix, tmp_path):
    wanted = {"0.1": True, "0.0.9": True, VERSION: True, "0.9": False, "1.0": False, "9": False}
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(versions LANGUAGES C)\n"
        f"foreach(version {' '.join(wanted)})\n"
        "  find_package(dormouse ${version} QUIET)\n"
        '  message(STATUS "${version}: ${dormouse_FOUND} ${dormouse_VERSION}")\n'
        "endforeach()\n"
        'message(STATUS "preload ${dormouse_PRELOAD}")\n'
    )
    said = cmake(tmp_path / "build", prefix, tmp_path).splitlines()
    assert f"-- preload {prefix}/lib/libdormouse_preload.so" in said
    for version, found in wanted.items():
        (line,) = [line for line in said if line.startswith(f"-- {version}: ")]
        assert line.split()[2:3] == [str(int(found))], line
        assert not found or line.split()[3] == VERSION


def test_a_staged_installation_names_the_final_prefix(tmp_path):
    stage = tmp_path / "stage"
    make_install(f"DESTDIR={stage}", "PREFIX=/opt/dormouse", "LIBDIR=/opt/dormouse/lib/64")
    inside = stage / "opt" / "dormouse"
    assert files(inside) == {name.replace("lib/", "lib/64/", 1) for name in FILES}
    for path in inside.rglob("*"):
        if path.suffix in (".pc", ".cmake"):
            text = path.read_text()
            assert "@" not in text and str(stage) not in text, path
    words = (inside / "lib/64/pkgconfig/dormouse.pc").read_text().splitlines()
    assert words[:2] == ["prefix=/opt/dormouse", "libdir=/opt/dormouse/lib/64"]


@pytest.mark.parametrize("wrong", ["PREFIX=usr", "LIBDIR=lib"])
def test_a_relative_prefix_is_refused(wrong):
    with pytest.raises(AssertionError, match="accepted: absolute paths"):
        make_install(wrong, "DESTDIR=/nowhere")
