"""The log of a GPU's allocations (``DORMOUSE_ALLOC_LOG_DIR``)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from alone import HERE
from conftest import IS_STANDIN, run_script

sys.path.append(str(HERE.parents[1] / "benches" / "traces"))
import format as traces  # noqa: E402

# Small blocks too, which the thread cache serves, a second stream, a refusal, and torch's history.
RUN = """
import torch, dormouse
dormouse.install()
MIB = 1 << 20
def hold(*sizes):
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
held = hold(100, 5 * MIB, 700, 3 * MIB + 5)
torch.cuda.memory._record_memory_history(max_entries=100)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    other = hold(2 * MIB, 512)
for tensor in other: tensor.record_stream(torch.cuda.current_stream())
del tensor, other
for step in range(300): hold(1 + step, step * 1000 + 1)
torch.cuda.memory._record_memory_history(enabled=None)
held += hold(40, 9 * MIB)
del held[1]
try: hold(1 << 40)
except torch.OutOfMemoryError: pass
print(torch.cuda.memory_stats()["requested_bytes.all.peak"], stream.cuda_stream)
"""


def test_the_log_of_a_gpu_has_the_peak_of_torchs_statistics_to_the_byte():
    with tempfile.TemporaryDirectory() as folder:
        out = run_script(RUN, DORMOUSE_ALLOC_LOG_DIR=folder)
        peak, stream = (int(word) for word in out.split())
        (log,) = Path(folder).iterdir()
        assert log.name.endswith("-cuda0.csv")
        events = traces.read(log).events
        live = most = 0
        for event in events:
            if event.action != "allocate failure":
                live += event.size if event.action == "allocate" else -event.size
                most = max(most, live)
        assert most == peak
        assert [event.size for event in events if event.action == "allocate failure"] == [1 << 40]
        assert f",{stream}\n" in log.read_text()
        program = Path(os.environ["DORMOUSE_LIB"]).parent / "dormouse"
        # A bundle for a GPU has no program.
        if IS_STANDIN or program.exists():
            said = subprocess.check_output([program, "replay", log], text=True)
            assert "1 where it was recorded" in said
