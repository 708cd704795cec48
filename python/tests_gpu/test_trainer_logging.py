"""What trainers log of memory, unchanged, with dormouse as torch's allocator.

transformers' memory tracker is the one that TRL's trainers have; it and DeepSpeed's function run
as they are. Megatron's training loop is in no wheel: its calls of torch are written out.
"""

from __future__ import annotations

import importlib.util
import pickle
import re
import tempfile
from pathlib import Path

import pytest
import torch
import viewer
from alone import alone

import dormouse

MIB = 1 << 20
GIB = 1 << 30
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
BEFORE_FORK = ("transformers.trainer_utils",)


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@alone()
def test_megatrons_report_and_tensorboard_scalars():
    dormouse.install()
    held = [filled(300), filled(100)]
    del held[1]
    # report_memory
    report = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    assert (report["allocated"], report["max allocated"]) == (300 * MIB, 400 * MIB)
    assert report["max reserved"] >= report["reserved"] >= 400 * MIB
    # --log-memory-to-tensorboard
    stats = torch.cuda.memory_stats()
    assert stats["reserved_bytes.all.current"] == report["reserved"]
    assert stats["allocated_bytes.all.current"] == report["allocated"]
    assert stats["allocated_bytes.all.peak"] == report["max allocated"]
    assert stats["allocation.all.current"] == 1


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_megatrons_record_memory_history():
    dormouse.install()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "oom_rank-0_snapshot.pickle"
        torch.cuda.memory._record_memory_history(
            True, trace_alloc_max_entries=100000, trace_alloc_record_context=True
        )

        def oom_observer(device, alloc, device_alloc, device_free):
            snapshot = torch.cuda.memory._snapshot()
            with path.open("wb") as file:
                pickle.dump(snapshot, file)

        torch._C._cuda_attach_out_of_memory_observer(oom_observer)
        held = filled(100)
        with pytest.raises(torch.OutOfMemoryError):
            filled(200)
        snapshot = pickle.loads(path.read_bytes())
    viewer.check(snapshot)
    events = [each for each in snapshot["device_traces"][0] if each["action"] in ("alloc", "oom")]
    assert [(each["action"], each["size"]) for each in events] == [
        ("alloc", held.nbytes),
        ("oom", 200 * MIB),
    ]
    assert all(each["frames"][0]["name"] == "filled" for each in events)


class Trainer:
    """Calls transformers' memory tracker as its trainer does: the tracker looks who calls."""

    def __init__(self):
        from transformers.trainer_utils import TrainerMemoryTracker

        self._tracker = TrainerMemoryTracker(skip_memory_metrics=False)
        self._tracker.start()
        self.weights = filled(300)
        self._tracker.stop_and_update_metrics()

    def train(self) -> dict[str, int]:
        metrics: dict[str, int] = {}
        self._tracker.start()
        filled(200)
        self.moments = filled(100)
        self._tracker.stop_and_update_metrics(metrics)
        return metrics


@alone()
def test_the_memory_tracker_of_transformers_and_trl():
    dormouse.install()
    torch.cuda.init()
    metrics = Trainer().train()
    figures = {name: count for name, count in metrics.items() if "gpu" in name}
    assert figures == {
        "init_mem_gpu_alloc_delta": 300 * MIB,
        "init_mem_gpu_peaked_delta": 0,
        "train_mem_gpu_alloc_delta": 100 * MIB,
        "train_mem_gpu_peaked_delta": 100 * MIB,
        "before_init_mem_gpu": 0,
    }


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="no deepspeed: `make test-trainers` has one")
@alone()
def test_deepspeeds_see_memory_usage():
    from deepspeed.runtime import utils

    dormouse.install()
    held = [filled(1024), filled(512)]
    del held[1]
    lines: list[str] = []
    # It prints.
    utils.print = lines.append
    utils.see_memory_usage("before step", force=True)
    assert lines[0] == "before step"
    names = ("MA", "Max_MA", "CA", "Max_CA")
    said = dict(re.findall(r"(\w+) ([\d.]+) +GB", lines[1]))
    assert tuple(said) == names, lines[1]
    assert (float(said["MA"]), float(said["Max_MA"])) == (1.0, 1.5)
    assert float(said["CA"]) >= 1.5
    # It resets the peak.
    assert torch.cuda.max_memory_allocated() == GIB
