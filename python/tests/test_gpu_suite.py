"""The GPU suite's own logic, with parts that need no GPU: limits, partial output, choice, bars."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
from gpu_suite import (
    attention,
    checks,
    cli,
    limits,
    memcheck,
    modes,
    parts,
    result,
    rows,
    summary,
    table,
)
from gpu_suite import tests as suite_tests
from suite_fakes import FACTS, ROOT, ROW, fake, lives, run, run_fake, says, setting

# Limits.

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"])
print(child.pid, flush=True)
time.sleep(99)
"""


def test_at_its_limit_the_whole_group_ends(monkeypatch):
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.2)
    # Two interpreters start meanwhile, perhaps on a busy machine.
    ended = run(STUBBORN, seconds=5)
    assert ended.status is None
    assert ended.seconds >= 5
    assert not lives(int(ended.output))


def test_a_leader_that_ends_leaves_nobody_behind():
    code = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
        "print(child.pid)"
    )
    ended = run(code)
    assert ended.status == 0
    assert not lives(int(ended.output))


def test_both_streams_and_the_status_are_kept():
    ended = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (ended.status, ended.output, ended.errors) == (7, "out\n", "err\n")


def test_long_output_keeps_its_end(monkeypatch):
    monkeypatch.setattr(limits, "OUTPUT_BYTES_MAX", 10)
    assert run("print('a' * 100 + 'b' * 9)").output == "b" * 9 + "\n"


# Results.


def test_figures_printed_before_the_limit_are_kept():
    code = says({"row": ROW}) + "print('{\"row\": {\"na', end='', flush=True); import time;"
    found = run_fake(code + "time.sleep(99)", seconds=6)
    assert found["status"] == result.TIMED_OUT
    assert "6 s" in found["why"]
    assert [each["met"] for each in found["rows"]] == [True]


def test_a_later_row_replaces_the_earlier_where_it_stood():
    better, other = {**ROW, "ours": 3.0}, {**ROW, "name": "m"}
    found = run_fake(says({"row": ROW}, {"row": other}, {"row": better}))
    assert [(each["name"], each["ours"]) for each in found["rows"]] == [("n", 3.0), ("m", 1.0)]
    assert found["status"] == result.MISSED
    assert found["why"] == "missed: n"


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        (says({"row": ROW}), result.HELD, ""),
        (says({"row": ROW}) + "raise SystemExit(1)", result.MISSED, "not all of it was measured"),
        (says({"cannot_run": "no GPU"}) + "raise SystemExit(2)", result.CANNOT_RUN, "no GPU"),
        ("raise SystemExit(2)", result.FAILED, "status 2: no word"),
        ("raise ValueError('seen 3')", result.FAILED, "status 1: ValueError: seen 3"),
        (says({"row": ROW}) + "import os; os.abort()", result.FAILED, "status -6: no word"),
        ("pass", result.FAILED, "it ended well and printed no figures"),
    ],
)
def test_how_a_part_ends_is_its_status(code, status, why):
    found = run_fake(code)
    assert (found["status"], found["why"]) == (status, why)


def test_a_panic_is_told_by_its_place_and_words():
    words = "thread 'main' panicked at src/x.rs:1:2:\nassertion failed\nnote: run with"
    found = run_fake(f"import sys; print({words!r}, file=sys.stderr); sys.exit(1)")
    assert found["why"].endswith("panicked at src/x.rs:1:2: assertion failed")


def test_the_object_of_gpu_check_becomes_rows():
    printed = {"part": "conformance", "held": True, "found": {"page_bytes": 2 << 20}}
    found = run_fake(says(printed), read=checks.conformance)
    assert found["status"] == result.HELD
    assert found["rows"][0]["how"].endswith("pages of 2 MiB")


def test_what_a_part_lacks_is_said():
    found = cli.run_part(parts.BY_NAME["conformance"], setting(), 60)
    assert found["status"] == result.CANNOT_RUN
    assert "--gpu-check" in found["why"]
    assert cli.run_part(fake("pass"), setting(), 1)["why"] == "1 s are left of --seconds"


# Bars.


@pytest.mark.parametrize(
    ("ours", "bar", "better", "met"),
    [
        (0.95, 0.95, rows.HIGHER, True),
        (0.94, 0.95, rows.HIGHER, False),
        (2.0, 2.0, rows.LOWER, True),
        (2.1, 2.0, rows.LOWER, False),
        (None, 2.0, rows.LOWER, False),
        (float("nan"), 2.0, rows.LOWER, False),
        (float("inf"), 2.0, rows.HIGHER, False),
        (1.0, None, rows.HIGHER, None),
    ],
)
def test_bars(ours, bar, better, met):
    assert rows.row("n", "u", ours, bar=bar, better=better, how="")["met"] is met


def test_copies_are_held_to_their_bar_from_4_mib_on():
    def copied(size):
        rate = {"ours_gb_per_s": 9.0, "plain_gb_per_s": 10.0, "ratio": 0.9}
        return {"way": "out", "bytes": size, **rate}

    made = checks.copies({"rows": [copied(1 << 20), copied(4 << 20)]})
    assert [each["met"] for each in made] == [None, False]
    assert made[1]["name"] == "copy device to host, 4 MiB"


def test_the_table_shows_what_was_missed():
    found = {"part": "p", "status": "missed", "seconds": 1.0, "rows": [], "why": "missed: n"}
    missed = rows.row("n", "s", 3.0, bar=2.0, better=rows.LOWER, how="", dense=1234.4, gone=None)
    lines = table.part({**found, "rows": [missed]})
    assert lines[0].startswith("p            missed")
    assert lines[1].split()[:6] == ["n", "3", "s", "≤", "2", "MISSED"]
    assert lines[1].endswith("dense 1,234")


def test_what_was_given_back_may_lack_what_streams_take():
    found = {"bytes": 1000, "compared_bytes": 1000, "sleep_gb_per_s": 1.0, "wake_gb_per_s": 1.0}
    for given_back, met in ((980, True), (979, False)):
        made = checks.sleep(found | {"given_back_bytes": given_back})
        assert [each["met"] for each in made if "given back" in each["name"]] == [met]


def mapped(state: str) -> dict:
    calls = {
        name: {"median_us": float(index), "longest_us": 10.0 * index, "count": 9}
        for index, name in enumerate((*checks.HANDLE_CALLS, "access_run", "unmap_run"), 1)
    }
    launch = {
        "call": {"median_us": 3.0, "longest_us": 4.0},
        "done": {"median_us": 5.0, "longest_us": 6.0},
    }
    return {
        "page_bytes": 2 << 20,
        "state": state,
        "run_handles": 16,
        "calls": calls,
        "launch": launch,
    }


def test_mapping_tells_each_call_and_what_a_launch_waits():
    found = {
        "series": [mapped("idle")],
        "alone": [mapped("idle")],
        "device": [],
        "kernel_refused": None,
    }
    alone, handle, launch = checks.mapping(found)
    assert (handle["name"], handle["ours"]) == ("a handle of 2 MiB, idle", 15.0)
    assert [handle["peers"][name] for name in checks.HANDLE_CALLS] == [1, 2, 3, 4, 5]
    assert handle["peers"]["unmap longest"] == 40.0
    assert handle["peers"]["headline seconds"] == pytest.approx(62.4e9 / (2 << 20) * 15e-6)
    assert (launch["ours"], launch["peers"]["done longest"]) == (3.0, 6.0)
    assert alone["ours"] == 3.0
    refused = checks.mapping(found | {"kernel_refused": 218})[-1]
    assert refused["met"] is False
    assert "error 218" in refused["how"]


def test_failed_tests_are_named(tmp_path, capfd, monkeypatch):
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_good(): pass\n@pytest.mark.parametrize('n', ['a b'])\n"
        "def test_bad(n): assert 0\n@pytest.mark.skip\ndef test_left(): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", "")
    assert suite_tests.main(str(tmp_path), "") == result.DONE
    found = json.loads(capfd.readouterr().out.splitlines()[-1])["row"]
    assert (found["ours"], found["peers"]) == (1, {"passed": 1, "skipped": 1})
    assert found["how"] == "failed: test_bad[a b]"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"test_x.py": "def test_good(): pass\n", "test_y.py": "import nowhere\n"}, "status 2"),
        ({"test_x.py": "import os, signal\ndef test_good(): pass\n"
                       "def test_killed(): os.kill(os.getpid(), signal.SIGKILL)\n"}, "status -9"),
        ({}, "status 5"),
    ],
)  # fmt: skip
def test_tests_that_did_not_all_run_are_not_held(files, why, tmp_path, monkeypatch):
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "gpu_suite.tests", str(tmp_path), ""]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))
    ended = limits.run(command, 60.0, dict(os.environ), ROOT)
    assert f"pytest ended with {why}" in ended.errors
    assert result.of("tests", ended, 60.0)["status"] == result.FAILED


def test_only_without_pytest_tests_cannot_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(suite_tests.importlib.util, "find_spec", lambda name: None)
    assert suite_tests.main(str(tmp_path), str(tmp_path)) == result.UNABLE
    assert "pytest is neither" in json.loads(capfd.readouterr().out)["cannot_run"]


def test_skipped_tests_alone_are_no_figure(tmp_path, capfd, monkeypatch):
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.skip\ndef test_left(): pass\n")
    monkeypatch.setenv("PYTHONPATH", "")
    assert suite_tests.main(str(tmp_path), "") == result.DONE
    found = json.loads(capfd.readouterr().out.splitlines()[-1])["row"]
    assert (found["ours"], found["met"]) == (None, False)


class Softmax:
    """A kernel on the CPU: FP64, with results in BF16. Gradients of values are multiplied."""

    name = "softmax"

    def __init__(self, factor: float | None):
        self.factor = factor

    def forward(self, query, key, value, causal, scores):
        if self.factor is None:
            raise RuntimeError("no kernel for this GPU")
        products = self._scores(query, key, causal, scores)
        out = (products.softmax(-1) @ self._spread(value)).bfloat16()
        return out, products.logsumexp(-1).float()

    def backward(self, grad, query, key, value, out, lse, causal, scores):
        grad, value, out = grad.double(), self._spread(value), out.double()
        weights = (self._scores(query, key, causal, scores) - lse.double().unsqueeze(-1)).exp()
        slope = weights * (grad @ value.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True))
        slope = slope * scores.scale
        of_values = self.factor * (weights.transpose(-2, -1) @ grad)
        of_keys = slope.transpose(-2, -1) @ query.double()
        of_shared = (self._gathered(x, key) for x in (of_keys, of_values))
        return [x.bfloat16() for x in (slope @ self._spread(key), *of_shared)]

    @staticmethod
    def _spread(x):
        return x.double().repeat_interleave(attention.EXACT_HEADS // x.shape[1], 1)

    @staticmethod
    def _gathered(grad, like):
        return grad.unflatten(1, (like.shape[1], -1)).sum(2)

    def _scores(self, query, key, causal, scores):
        import torch

        products = query.double() @ self._spread(key).transpose(-2, -1) * scores.scale
        if causal is False:
            return products
        lengths = [query.shape[2]] if causal is True else causal.lengths
        seen = torch.block_diag(*(torch.ones(each, each).tril() for each in lengths))
        return products.masked_fill(seen == 0, -math.inf)


@pytest.fixture
def operands_of_the_cpu(monkeypatch):
    import torch

    def operands(torch, batch, heads, kv_heads, rows, keys):
        shapes = ((batch, heads, rows), (batch, kv_heads, keys), (batch, kv_heads, keys))
        return [torch.randn(*shape, attention.HEAD_DIM).bfloat16() for shape in shapes]

    torch.manual_seed(1)
    monkeypatch.setattr(attention, "_operands", operands)


@pytest.mark.parametrize("gradients", [attention._merged, attention._in_pieces])
@pytest.mark.parametrize(
    ("factor", "met"), [(1.0, True), (0.0, False), (math.nan, False), (None, False)]
)
@pytest.mark.usefixtures("operands_of_the_cpu")
def test_every_gradient_of_a_kernel_is_held_to_the_bar(gradients, factor, met, capsys):
    import torch

    attention._judged(torch, Softmax(factor), "what", gradients)
    found = rows.judged(json.loads(capsys.readouterr().out)["row"])
    assert found["bar"] == attention.OVER_PLAIN_MAX
    assert found["met"] is met
    assert (found["ours"] is None) is not met


def test_the_kernels_are_those_that_the_runtime_calls(capsys, monkeypatch):
    import torch
    from dormouse.hf import cuda_kernels

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_900)
    for kernel in cuda_kernels.CANDIDATES:
        monkeypatch.setattr(kernel, "is_enabled", lambda: True)
    assert attention._kernels() == list(cuda_kernels.CANDIDATES)
    assert not capsys.readouterr().out
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert "cudnn" not in [each.name for each in attention._kernels()]
    assert "cudnn, left out" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["allocator", "pool"])
def test_nothing_is_trimmed_between_a_sleep_and_the_reading_of_memory(mode, capsys, monkeypatch):
    """Pages that a sleep left in a cache would otherwise count as given back by it."""
    import torch

    import dormouse

    calls = []

    def told(name, value=None):
        return lambda *arguments: calls.append(name) or value

    asleep = SimpleNamespace(
        add=told("add"),
        sleep=told("sleep"),
        wake=told("wake"),
        use=contextlib.nullcontext,
    )
    runtime = SimpleNamespace(tag=lambda name: asleep, trim=told("trim"))
    installed = SimpleNamespace(runtime=runtime, pool=lambda name: asleep)
    monkeypatch.setattr(dormouse, "install", lambda mode: installed)
    monkeypatch.setattr(modes, "EACH_BYTES", 64)
    monkeypatch.setattr(modes, "_used", told("used", 0))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", told("empty_cache"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    modes.CHECKS[mode]()
    first = calls.index("used")
    assert calls[first : first + 4] == ["used", "sleep", "used", "wake"]
    assert set(calls[:first]) & {"trim", "empty_cache"}, "memory that is free counts before it"
    capsys.readouterr()


@pytest.mark.parametrize(("left", "met"), [(0, False), (255, False), (256, True)])
def test_bytes_that_never_left_are_not_back(left, met, capsys, monkeypatch):
    import dormouse
    import torch

    tiers = {"device": 256, "host": left, "nvme": 0}
    stats = {"tiers": {name: {"current_bytes": count} for name, count in tiers.items()}}
    installed = SimpleNamespace(
        runtime=SimpleNamespace(stats=lambda: stats),
        saved_tensor_offload=lambda: SimpleNamespace(hooks=contextlib.nullcontext),
    )
    monkeypatch.setattr(modes, "COUNT", 4)
    monkeypatch.setattr(modes, "EACH_BYTES", 64)
    monkeypatch.setattr(dormouse, "install", lambda mode: installed)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    modes.copy()
    found = rows.judged(json.loads(capsys.readouterr().out)["row"])
    assert (found["ours"], found["met"]) == ((0, True) if met else (None, False))


def test_memcheck_does_not_count_what_the_driver_refuses():
    at = memcheck.OPTIONS.index("--report-api-errors")
    assert memcheck.OPTIONS[at + 1] == "no"


def test_the_summary_is_a_page():
    missed = rows.row("n|m", "s", 3.0, bar=2.0, better=rows.LOWER, how="h", dense=1.5, gone=None)
    found = {"part": "p", "status": "missed", "seconds": 1.0, "rows": [missed], "why": "missed: n"}
    lines = summary.markdown("Title", [found], FACTS)
    assert lines[0] == "# Title"
    assert "GPU H200; driver 580.1; CUDA of the driver 13.0; capability 9.0" in lines[2]
    assert "DORMOUSE_CUDA_PAGE_BYTES 16777216" in lines[2]
    assert "| p | missed | 1 | missed: n |" in lines
    assert lines[-1] == "| p: n\\|m | 3 | s | ≤ 2 | MISSED | dense 1.5 | h |"
