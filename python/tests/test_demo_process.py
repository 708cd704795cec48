"""A worker's pipe, peak readings, and what the run says when something is missing."""

from __future__ import annotations

import json
import mmap

import pytest

from dormouse.demo import modes, run
from dormouse.demo.memory import Memory, PeakMeter
from dormouse.demo.process import Process, WorkerError

SCRIPT = """
import json, sys
say = lambda message: print(json.dumps(message), flush=True)
say({"reply": {"ready": True}})
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "quit":
        break
    if command["do"] == "die":
        sys.exit("the last thing I say")
    if command["do"] == "refuse":
        say({"error": "ValueError: no"})
        continue
    say({"event": "phase", "name": "B"})
    say({"reply": command})
"""


@pytest.fixture
def worker(tmp_path):
    with Process(["-c", SCRIPT], preload=None, log=tmp_path / "log") as process:
        assert process.ready() == {"ready": True}
        yield process


def test_a_command_its_events_and_its_reply(worker):
    heard = []
    reply = worker.query("run", heard.append, microbatch_tokens=3)
    assert reply == {"do": "run", "microbatch_tokens": 3}
    assert heard == [{"event": "phase", "name": "B"}]
    assert worker.query("again") == {"do": "again"}


def test_a_refusal_is_raised_with_its_reason(worker):
    with pytest.raises(WorkerError, match="ValueError: no"):
        worker.query("refuse")


def test_a_death_is_raised_with_the_last_words(worker):
    with pytest.raises(WorkerError, match="status 1; it said:\n  the last thing I say"):
        worker.query("die")
    with pytest.raises(WorkerError, match="the last thing I say"):
        worker.query("run")


class FakeMemory:
    """Two accounts that follow a script."""

    def __init__(self):
        self.now = {"resident": 100, "tracked": 10}
        self.peak = dict(self.now)
        self.trims = 0

    def use(self, resident: int, tracked: int):
        self.now = {"resident": resident, "tracked": tracked}
        self.peak = {k: max(self.peak[k], v) for k, v in self.now.items()}

    def trim(self):
        self.trims += 1

    def resident(self):
        return self.now["resident"]

    def tracked(self):
        return self.now["tracked"]

    def resident_peak(self):
        return self.peak["resident"]

    def tracked_peak(self):
        return self.peak["tracked"]

    def reset_peaks(self):
        self.peak = dict(self.now)


def test_peaks_belong_to_their_phase_and_start_at_idle():
    memory = FakeMemory()
    meter = PeakMeter(memory)
    assert meter.idle() == {"resident": 100, "tracked": 10}
    assert memory.trims == 1
    memory.use(900, 90)  # before the first phase: nobody's
    memory.use(120, 11)
    meter.on_phase("A")
    memory.use(500, 50)
    memory.use(200, 45)
    meter.on_phase("B")
    memory.use(300, 20)
    meter.on_phase("end")
    memory.use(9000, 900)
    assert meter.peaks == {
        "A": {"resident": 400, "tracked": 40},
        # B began with what A left, and never held less than that at its peak.
        "B": {"resident": 200, "tracked": 35},
    }
    assert meter.step_peak() == {"resident": 400, "tracked": 40}


def test_a_phase_before_idle_is_refused():
    with pytest.raises(RuntimeError, match="call idle"):
        PeakMeter(FakeMemory()).on_phase("A")


def test_resident_memory_is_this_process():
    class Runtime:
        def reset_peaks(self):
            pass

        def trim(self):
            return 0

    memory = Memory(Runtime())
    memory.trim()
    memory.reset_peaks()
    before = memory.resident()
    # Not from the heap: what it frees may stay resident in a cache.
    with mmap.mmap(-1, 64 << 20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        held = memory.resident()
    assert held - before >= 60 << 20
    assert memory.resident_peak() - before >= 60 << 20
    memory.reset_peaks()
    assert memory.resident_peak() < held


def test_what_is_missing_is_said_before_anything_starts(tmp_path, monkeypatch):
    options = run.Options(preload=tmp_path / "lib.so", nvme_dir=tmp_path / "nvme")
    with pytest.raises(run.CannotRun, match="lib.so is missing; `make lib` builds it"):
        run.check_ready(options)
    options.preload.touch()
    with pytest.raises(run.CannotRun, match="2 rounds; accepted: at least 3"):
        run.check_ready(run.Options(options.preload, options.nvme_dir, rounds=2))
    monkeypatch.setattr(run, "NVME_FILE_BYTES", 1 << 60)
    with pytest.raises(run.CannotRun, match="MiB free; accepted: at least"):
        run.check_ready(options)
    monkeypatch.setattr(run, "NVME_FILE_BYTES", 1)
    run.check_ready(options)
    assert options.nvme_dir.is_dir()


def test_the_bar_counts_the_steps_that_are_taken(tmp_path, monkeypatch):
    """A whole run over a worker that does nothing ends with its bar full."""
    from dormouse.demo import trace

    recorded = trace.read()
    options = run.Options(tmp_path, tmp_path, rounds=4, full=True)
    progress = CountingProgress()
    monkeypatch.setattr(run, "Process", IdleProcess)
    monkeypatch.setattr(run.models, "prepare", lambda source: None)
    monkeypatch.setattr(run.models, "find", lambda: None)
    measured = run._measure(options, recorded, progress)
    assert progress.count == run._step_count(options, recorded)
    assert len(measured.rounds) == 4
    assert len(measured.groups) == len(recorded.groups)
    assert set(measured.peaks) == set(modes.MODES)


class CountingProgress:
    def __init__(self):
        self.count = 0

    def begin(self, what):
        assert len(what) <= run.DESCRIPTION_COLUMNS

    def done(self):
        self.count += 1

    listen = None


class IdleProcess:
    """Answers everything at once with plausible nothing."""

    def __init__(self, arguments, *, preload, log):
        assert arguments[2] in modes.MODES

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def ready(self):
        return {}

    def query(self, name, listen=None, **arguments):
        json.dumps(arguments)
        return {
            "id": "x", "prompt_tokens": 9, "responses": 1, "response_tokens": [4], "threads": 1,
            "nvme_write_bytes_per_s": 1, "nvme_read_bytes_per_s": 1, "speedup": 2.0,
            "wall_seconds": 1.0, "cpu_seconds": 1.0, "loss": 0.0,
        }  # fmt: skip
