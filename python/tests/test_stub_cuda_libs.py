"""scripts/stub_cuda_libs.py: which symbols go where, and that what it builds loads."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "stub_cuda_libs.py"


@pytest.fixture(scope="module")
def stubs():
    spec = importlib.util.spec_from_file_location("stub_cuda_libs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_symbols_go_to_the_library_they_belong_to(stubs):
    linkage = stubs.Linkage(
        undefined={"cublasCreate": "v1", "cublasLtMatmul": "", "ncclSend": "", "malloc": "GLIBC"},
        defined={"ncclSend"},
    )
    assert stubs.symbols_of("libcublas", linkage) == {"cublasCreate": "v1"}
    assert stubs.symbols_of("libcublasLt", linkage) == {"cublasLtMatmul": ""}
    assert stubs.symbols_of("libnccl", linkage) == {}


def test_a_built_stub_has_its_name_symbols_and_versions(stubs, tmp_path):
    path = tmp_path / "libcufft.so.12"
    stubs.build_stub(path, {"cufftPlan": "libcufft.so.12", "cufftExec": "libcufft.so.12"})
    assert ctypes.CDLL(str(path)).cufftPlan() == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", path], capture_output=True, text=True, check=True
    ).stdout
    assert "soname: [libcufft.so.12]" in dynamic
    # A library linked against it is read back as needing these versions of these symbols.
    source = "int cufftPlan(void); int user(void) { return cufftPlan(); }"
    user = tmp_path / "libuser.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", path, "-o", user]
    subprocess.run(command, input=source, text=True, check=True)
    linkage = stubs.read_linkage([user])
    assert linkage.undefined["cufftPlan"] == "libcufft.so.12"
    assert "libcufft.so.12" in linkage.needed
    assert "user" in linkage.defined


def test_a_library_of_which_nothing_is_used(stubs, tmp_path):
    stubs.build_stub(tmp_path / "libcupti.so.13", {})
    ctypes.CDLL(str(tmp_path / "libcupti.so.13"))


def test_only_gpu_requirements_are_forgotten(stubs, tmp_path):
    metadata = tmp_path / "METADATA"
    metadata.write_text(
        "Name: torch\nRequires-Dist: filelock\nRequires-Dist: nvidia-nccl-cu13==2.27\n"
        "Requires-Dist: triton==3.5; platform_system == 'Linux'\nRequires-Dist: cuda-bindings\n"
        "\nRequires triton, says the text.\n"
    )
    stubs.forget_gpu_requirements(metadata)
    assert metadata.read_text() == (
        "Name: torch\nRequires-Dist: filelock\n\nRequires triton, says the text.\n"
    )
