"""torch's memory history, snapshots and out-of-memory observers in mode allocator."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import viewer
from alone import alone
from conftest import NEW_STATS, SCRIPT_SECONDS_MAX, TORCH, busy, run_script, standin_only

import dormouse
from dormouse.modes import history

MIB = 1 << 20
MEMORY = torch.cuda.memory
HERE = Path(__file__).resolve()
HAS_TRACEBACKS = TORCH > (2, 11)


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def recorded(device: int = 0) -> list[dict]:
    """The events of a device but those of snapshots; the snapshot is one that viewers can draw."""
    snapshot = MEMORY._snapshot()
    viewer.check(snapshot)
    return [each for each in snapshot["device_traces"][device] if each["action"] != "snapshot"]


def actions(events: list[dict]) -> list[str]:
    return [each["action"] for each in events]


def sums(segments: list[dict]) -> dict[str, int]:
    """Figures of torch's statistics, from the segments of the first GPU."""
    mine = [each for each in segments if each["device"] == 0]
    names = {"reserved": "total_size", "allocated": "allocated_size", "active": "active_size"}
    return {name: sum(each[key] for each in mine) for name, key in names.items()}


def figures() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {
        name: stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated", "active")
    }


KEYS = """
import json, sys
import torch
{install}
memory = torch.cuda.memory
memory._record_memory_history(stacks="python")
held = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
del held[0]
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
memory._snapshot()
snapshot = memory._snapshot()
events = {{each["action"]: sorted(each) for each in snapshot["device_traces"][0]}}
frame = snapshot["device_traces"][0][0]["frames"][0]
print(json.dumps({{
    "stats": sorted(torch.cuda.memory_stats()),
    "snapshot": sorted(snapshot),
    "segment": sorted(snapshot["segments"][0]),
    "block": sorted(snapshot["segments"][0]["blocks"][0]),
    "frame": sorted(frame),
    "events": events,
}}))
"""
# What events of ours may have beside torch's, and the names of those on pages, which are those of
# torch's expandable segments.
MORE = {"category", "frames"}
OF_PAGES = {"segment_alloc": "segment_map", "segment_free": "segment_unmap"}


def test_every_key_is_torchs_own():
    own, ours = (
        json.loads(run_script(KEYS.format(install=install)))
        for install in ("", "import dormouse; dormouse.install()")
    )
    assert set(ours.pop("stats")) - NEW_STATS == set(own.pop("stats")) - NEW_STATS
    for name in ("snapshot", "segment", "block", "frame"):
        assert set(own[name]) <= set(ours[name]), name
        # torch 2.11 has fewer than later ones, whose keys ours are.
        assert ours[name] == own[name] or TORCH <= (2, 11), name
    events = {OF_PAGES.get(name, name): keys for name, keys in own["events"].items()}
    assert ours["events"].keys() == events.keys()
    for name, keys in events.items():
        assert set(keys) <= set(ours["events"][name]), name
        assert set(ours["events"][name]) <= set(keys) | MORE or TORCH <= (2, 11), name


@alone()
def test_what_came_and_went_with_the_lines_it_came_from():
    dormouse.install()
    MEMORY._record_memory_history()
    held = filled(3)
    line = sys._getframe().f_lineno - 1
    address = held.data_ptr()
    del held
    mapped, alloc, requested, completed = recorded()
    assert actions([mapped, alloc, requested, completed]) == [
        *("segment_map", "alloc", "free_requested", "free_completed")
    ]
    assert mapped["addr"] == alloc["addr"] == requested["addr"] == completed["addr"] == address
    assert alloc["size"] == requested["size"] == completed["size"] == 3 * MIB
    assert mapped["size"] == torch.cuda.memory_reserved() >= 3 * MIB
    inner, outer = alloc["frames"][:2]
    assert inner["name"] == "filled" and Path(inner["filename"]) == HERE
    assert (outer["name"], outer["line"]) == (sys._getframe().f_code.co_name, line)
    assert requested["frames"][0]["line"] == line + 3
    assert requested["frames"] == completed["frames"]


@alone()
def test_contexts_are_those_asked_for():
    dormouse.install()
    for context, has_state, has_alloc, has_free in (
        (None, False, False, False),
        ("state", True, False, False),
        ("alloc", True, True, False),
        ("all", True, True, True),
    ):
        MEMORY._record_memory_history("all", context=context, clear_history=True)
        held, gone = filled(3), filled(5)
        del gone
        frames = {each["action"]: bool(each["frames"]) for each in recorded()}
        assert (frames["alloc"], frames["free_completed"]) == (has_alloc, has_free), context
        block = block_of(held)
        assert bool(block["frames"]) == has_state, context
        if HAS_TRACEBACKS:
            traceback = MEMORY._allocation_traceback(held.data_ptr())
            assert (traceback is not None) == has_state
        del held
    assert not HAS_TRACEBACKS or MEMORY._allocation_traceback(4096) is None


def block_of(tensor: torch.Tensor) -> dict:
    blocks = [block for each in torch.cuda.memory_snapshot() for block in each["blocks"]]
    (found,) = [each for each in blocks if each["address"] == tensor.data_ptr()]
    return found


@alone()
def test_state_all_and_nothing():
    dormouse.install()
    assert not torch._C._cuda_isHistoryEnabled()
    MEMORY._record_memory_history("state", context="state")
    assert torch._C._cuda_isHistoryEnabled()
    held = [filled(3), filled(5)]
    assert len(MEMORY._snapshot()["device_traces"][0]) == 1
    assert all(block_of(each)["frames"] for each in held)
    MEMORY._record_memory_history("all", max_entries=1000)
    held.append(filled(7))
    assert actions(recorded())[-1] == "alloc"
    MEMORY._record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()
    held.append(filled(9))
    assert recorded() == []
    MEMORY._record_memory_history(True, trace_alloc_max_entries=50, trace_alloc_record_context=True)
    held.append(filled(11))
    assert recorded()[-1]["size"] == 11 * MIB and recorded()[-1]["frames"]
    MEMORY._record_memory_history(False)
    assert recorded() == []


@alone()
def test_the_newest_events_stay_and_the_settings_tell():
    dormouse.install()
    MEMORY._record_memory_history(max_entries=20)
    for mib in range(1, 31):
        filled(mib)
    snapshot = MEMORY._snapshot()
    viewer.check(snapshot)
    events = snapshot["device_traces"][0]
    assert events[-1]["action"] == "snapshot" and events[-2]["size"] == 30 * MIB
    settings = snapshot["allocator_settings"]
    assert settings["trace_alloc_max_entries"] == 20 and settings["trace_alloc_overflowed"]
    assert settings["DORMOUSE_OFFLOAD_WINDOW_LAYERS"] and settings["backend"] == "dormouse"
    MEMORY._record_memory_history(clear_history=True)
    settings = MEMORY._snapshot()["allocator_settings"]
    assert settings["trace_alloc_max_entries"] == history.EVENTS_DEFAULT
    assert not settings["trace_alloc_overflowed"]
    assert recorded() == []


@alone()
def test_actions_are_skipped():
    dormouse.install()
    MEMORY._record_memory_history(skip_actions=["free_requested", "segment_alloc", "snapshot"])
    filled(3)
    events = MEMORY._snapshot()["device_traces"][0]
    assert actions(events) == ["alloc", "free_completed"]


@alone()
def test_values_that_are_not_accepted():
    dormouse.install()
    for wish, seen in (
        ({"enabled": "some"}, "enabled is 'some'; accepted: None, 'state', 'all'"),
        ({"context": "some"}, "context is 'some'"),
        ({"stacks": "c"}, "stacks is 'c'; accepted: 'python', 'all'"),
        ({"skip_actions": ["malloc"]}, "skip_actions is 'malloc'"),
        *(
            [({"record_pinned_host_memory": True}, "record_pinned_host_memory is True")]
            if TORCH > (2, 11)
            else []
        ),
    ):
        with pytest.raises(RuntimeError, match=seen):
            MEMORY._record_memory_history(**wish)


@alone()
def test_what_history_lacks_is_listed():
    installed = dormouse.install()
    (said,) = [each for each in installed.why if each.startswith("torch's memory history")]
    for name in ("C++ frames", "record_pinned_host_memory", "compile_context", "1048576 events"):
        assert name in said


@alone()
def test_what_another_stream_uses_is_pending():
    dormouse.install()
    MEMORY._record_memory_history()
    held, side = filled(3), torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy(300)
        held.record_stream(side)
    address = held.data_ptr()
    del held
    assert actions(recorded())[-1] == "free_requested"
    snapshot = torch.cuda.memory_snapshot()
    states = {block["address"]: block["state"] for each in snapshot for block in each["blocks"]}
    assert states[address] == "active_pending_free"
    assert sums(snapshot) == figures()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert actions(recorded())[-2:] == ["free_completed", "segment_unmap"]


@alone()
def test_the_sums_are_the_statistics():
    dormouse.install()
    held = [torch.empty(1 + 977 * k * k, dtype=torch.uint8, device="cuda") for k in range(40)]
    held += [filled(mib) for mib in (1, 3, 30, 70)]
    del held[1::2]
    with torch.cuda.stream(torch.cuda.Stream()):
        held.append(filled(5))
    for _ in range(2):
        # The second time without a thread cache.
        snapshot = torch.cuda.memory_snapshot()
        assert sums(snapshot) == figures()
        requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
        assert sum(each["requested_size"] for each in snapshot) == requested
        assert {each["segment_type"] for each in snapshot} == {"small", "large"}
        MEMORY._record_memory_history()
    viewer.check(MEMORY._snapshot())


@alone()
def test_a_sleep_leaves_the_gpu_and_is_in_its_tier():
    with tempfile.TemporaryDirectory(dir=".") as folder:
        installed = dormouse.install(nvme_dir=folder, nvme_file_bytes=256 * MIB)
        MEMORY._record_memory_history()
        tags = {name: installed.runtime.tag(name) for name in ("host", "nvme")}
        held = {}
        for mib, (name, tag) in zip((40, 24), tags.items(), strict=True):
            with tag.collect():
                held[name] = filled(mib)
        awake = filled(10)
        for name, tag in tags.items():
            assert tag.sleep(name) is None
        torch.cuda.synchronize()
        snapshot = MEMORY._snapshot()
        viewer.check(snapshot)
        gpu, host, nvme = snapshot["device_traces"]
        assert sums(snapshot["segments"]) == figures()
        assert figures()["allocated"] == awake.nbytes
        by_device = {1: 0, 2: 0}
        for segment in snapshot["segments"]:
            if segment["device"]:
                by_device[segment["device"]] += segment["allocated_size"]
        assert by_device == {1: 40 * MIB, 2: 24 * MIB}
        assert viewer.active_bytes(gpu)[-1] == awake.nbytes
        assert viewer.active_bytes(host)[-1] == 40 * MIB
        assert viewer.active_bytes(nvme)[-1] == 24 * MIB
        fell = [each for each in gpu if "dormouse" in each["user_metadata"]]
        assert {(each["user_metadata"]["tag"], each["size"]) for each in fell} == {
            *(("host", 40 * MIB), ("nvme", 24 * MIB))
        }
        assert {each["category"] for each in gpu} == {"host", "nvme", "unknown"}
        for tag in tags.values():
            tag.wake()
        torch.cuda.synchronize()
        snapshot = MEMORY._snapshot()
        viewer.check(snapshot)
        (awoke,) = [
            each
            for each in snapshot["device_traces"][0]
            if each["action"] == "alloc"
            and each["size"] == 40 * MIB
            and each["user_metadata"]
            and each["user_metadata"].get("dormouse") == "awoke"
        ]
        assert awoke["frames"][0]["name"] == "filled"
        assert sums(snapshot["segments"]) == figures()
        assert figures()["allocated"] == 74 * MIB
        # The tiers are not torch's: what lists segments alone does not have them.
        assert {each["device"] for each in torch.cuda.memory_snapshot()} == {0}
        for tag in tags.values():
            tag.close()


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_observers_are_told_where_memory_runs_out():
    dormouse.install()
    MEMORY._record_memory_history()
    seen = []

    def observe(device: int, requested: int, limit: int, left: int) -> None:
        # As trainers do: what is written has the failed request.
        seen.append((device, requested, limit, left, actions(recorded())[-1]))

    torch._C._cuda_attach_out_of_memory_observer(observe)
    held = filled(100)
    with pytest.raises(torch.OutOfMemoryError):
        filled(200)
    ((device, requested, limit, left, last),) = seen
    assert (device, requested, last) == (0, 200 * MIB, "oom")
    assert left == limit - torch.cuda.memory_reserved() and limit <= 256 * MIB
    event = recorded()[-1]
    assert (event["size"], event["device_free"]) == (200 * MIB, left)
    assert event["frames"][0]["name"] == "filled"
    assert held.is_cuda


def test_an_observer_that_fails_is_printed_and_the_error_is_the_same():
    code = (
        f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\n"
        "import torch, dormouse\n"
        "dormouse.install()\n"
        "def observe(*figures):\n"
        "    raise ValueError('in the observer')\n"
        "torch._C._cuda_attach_out_of_memory_observer(observe)\n"
        "try:\n"
        "    torch.empty(1 << 50, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError:\n"
        "    print('out of memory')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SCRIPT_SECONDS_MAX
    )
    assert (done.returncode, done.stdout) == (0, "out of memory\n"), done.stderr
    assert "ValueError: in the observer" in done.stderr


@pytest.mark.skipif(TORCH <= (2, 11), reason="torch 2.11 has no metadata of events")
@alone()
def test_metadata_is_the_threads_own():
    dormouse.install()
    MEMORY._record_memory_history(context=None)
    assert MEMORY._memory_metadata_supported()
    MEMORY._set_memory_metadata({"step": 3})
    held = [filled(3)]

    def work() -> None:
        MEMORY._set_memory_metadata("of a thread")
        held.append(filled(5))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert MEMORY._get_memory_metadata() == '{"step":3}'
    MEMORY._set_memory_metadata("")
    held.append(filled(7))
    MEMORY._annotate_tensor(held[0][5:], "a view")
    said = {each["size"]: each["user_metadata"] for each in recorded() if each["action"] == "alloc"}
    assert said == {3 * MIB: '{"step":3}', 5 * MIB: "of a thread", 7 * MIB: ""}
    note = recorded()[-1]
    assert (note["action"], note["addr"], note["user_metadata"]) == (
        *("annotate", held[0].data_ptr(), "a view"),
    )


@alone()
def test_memory_of_graphs_has_their_pools():
    dormouse.install()
    MEMORY._record_memory_history()
    graph, outside = torch.cuda.CUDAGraph(), filled(10)
    with torch.cuda.graph(graph):
        inside = outside.clone()
    snapshot = MEMORY._snapshot()
    viewer.check(snapshot)
    pools = {
        each["addr"]: each["pool_id"]
        for each in snapshot["device_traces"][0][:-1]
        if each["action"] == "alloc"
    }
    assert pools[inside.data_ptr()] == graph.pool() and pools[outside.data_ptr()] == (0, 0)


@alone()
def test_training_on_several_threads_stays_drawable():
    dormouse.install()
    MEMORY._record_memory_history(max_entries=5000)
    # Without matrix products, which the stand-in has not.
    weights = [torch.ones(64, 256, device="cuda", requires_grad=True) for _ in range(6)]
    optimizer = torch.optim.AdamW(weights)
    stop = threading.Event()
    counts = []

    def churn() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                counts.append(len([filled(1), filled(2)]))

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            hidden = torch.empty(64, 256, device="cuda")
            for weight in weights:
                hidden = (hidden * weight).relu()
            hidden.backward(torch.empty_like(hidden))
            del hidden
            optimizer.step()
            optimizer.zero_grad()
            viewer.check(MEMORY._snapshot())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert counts
    del weights, weight, optimizer
    gc.collect()
    torch.cuda.synchronize()
    viewer.check(MEMORY._snapshot())


@alone()
def test_torch_gets_its_functions_back():
    names = ("_cuda_record_memory_history", "_cuda_memorySnapshot", "_cuda_setMemoryMetadata")
    own = [getattr(torch._C, name) for name in names]
    installed = dormouse.install()
    MEMORY._record_memory_history()
    held = filled(3)
    installed.uninstall_stats()
    assert [getattr(torch._C, name) for name in names] == own
    with pytest.raises(RuntimeError, match="does not yet support"):
        MEMORY._record_memory_history()
    del held


# Its first argument, for each of its commands.
COMMANDS = {
    "stats": ("{before}",),
    "trace": ("{before}",),
    "segments": ("{before}", "-o", "{out}"),
    "memory": ("{before}", "-o", "{out}"),
    "trace_plot": ("{before}", "-o", "{out}"),
    "trace_plot --segments": ("{before}", "-o", "{out}"),
    "trace_plot --filter_freed": ("{before}", "-o", "{out}"),
    "segment_plot": ("{before}", "-o", "{out}"),
}


@alone()
def test_a_dump_opens_in_every_command_of_torchs_viewer():
    installed = dormouse.install()
    MEMORY._record_memory_history()
    held = [filled(mib) for mib in (30, 5, 1)]
    tag = installed.runtime.tag("weights")
    tag.add(held[0])
    assert tag.sleep("host") is None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {which: folder / f"{which}.pickle" for which in ("before", "out")}
        MEMORY._dump_snapshot(str(paths["before"]))
        data = paths["before"].read_bytes()
        viewer.check_pickle(data)
        viewer.check(pickle.loads(data))
        before = torch.cuda.memory_snapshot()
        held.append(filled(50))
        # It would be fetched.
        script = folder / ".cache" / "flamegraph.pl"
        script.parent.mkdir()
        script.write_text("#!/bin/sh\ncat\n")
        script.chmod(0o755)
        said = {}
        for command, arguments in COMMANDS.items():
            paths["out"].unlink(missing_ok=True)
            done = subprocess.run(
                [
                    *(sys.executable, torch.cuda._memory_viz.__file__, command.split()[0]),
                    *(each.format(**paths) for each in arguments),
                    *command.split()[1:],
                ],
                env=os.environ | {"HOME": name},
                capture_output=True,
                text=True,
                timeout=SCRIPT_SECONDS_MAX,
            )
            assert done.returncode == 0, (command, done.stderr)
            said[command] = paths["out"].read_text() if "{out}" in arguments else done.stdout
    assert "[a ] 40.0MiB allocated" not in said["stats"]
    assert "total_allocated: 36.0MiB" in said["stats"], said["stats"]
    assert "30.0MiB" in said["trace"] and "del a # 30.0MiB" in said["trace"]
    for command in ("segments", "memory"):
        assert "test_history.py" in said[command] and "filled" in said[command]
    # The command of that name fails on every snapshot, torch's own too: it takes no list of segments.
    compared = torch.cuda._memory_viz.compare(
        before, torch.cuda.memory_snapshot(), format_flamegraph=str
    )
    assert "only_after" in compared and f"filled {50 * MIB}" in compared
    assert all("snapshot.pickle" in said[each] for each in COMMANDS if "plot" in each)


@alone()
def test_flame_graphs_are_saved():
    dormouse.install()
    MEMORY._record_memory_history()
    held = filled(3)
    lines = torch.cuda._memory_viz.memory(MEMORY._snapshot(), format_flamegraph=str)
    assert f"filled {held.nbytes}" in lines
    with tempfile.TemporaryDirectory() as name:
        os.environ["HOME"] = name
        script = Path(name) / ".cache" / "flamegraph.pl"
        script.parent.mkdir()
        script.write_text("#!/bin/sh\ncat\n")
        script.chmod(0o755)
        for save in (MEMORY._save_memory_usage, MEMORY._save_segment_usage):
            path = Path(name) / "out.svg"
            save(str(path))
            assert "filled" in path.read_text()


@standin_only("a process of its own has no device")
def test_without_an_allocation_there_is_nothing():
    out = run_script(
        "import torch, dormouse\n"
        "dormouse.install()\n"
        "torch.cuda.memory._record_memory_history()\n"
        "snapshot = torch.cuda.memory._snapshot()\n"
        "print(snapshot['segments'], len(snapshot['device_traces']))\n"
    )
    assert out == "[] 3\n"


@alone()
def test_pinned_pages_of_a_snapshot_are_read_by_others_pickles():
    dormouse.install()
    MEMORY._record_memory_history()
    held = [filled(1) for _ in range(300)]
    snapshot = MEMORY._snapshot()
    for protocol in (2, 3, 4):
        file = io.BytesIO()
        pickle.dump(snapshot, file, protocol=protocol)
        viewer.check_pickle(file.getvalue())
        assert pickle.loads(file.getvalue()) == snapshot
    assert held[0].is_cuda


@alone()
def test_a_forked_child_ends_quietly():
    dormouse.install()
    MEMORY._record_memory_history()
    held = filled(3)
    child = os.fork()
    if child == 0:
        # As an interpreter ends: with what was registered for it.
        del held
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert actions(recorded()) == ["segment_map", "alloc"]
