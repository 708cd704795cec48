"""A step's report as text, plain data and scalars."""

from __future__ import annotations

import json
import math

import pytest
from models import group, loss_fn, tiny

from dormouse.hf import SharedPrefix, StepReport
from dormouse.hf.step_report import NOTES_MAX, in_units

MIB, GIB = 1 << 20, 1 << 30


def prefix(**changes) -> dict:
    """A prefix's report as the runtime gives it: 2 of 3 GiB slept, waits as long as the copies."""
    return {
        "dormant_bytes": 3 * GIB,
        "boundary_bytes": 5 * MIB,
        "asleep_bytes_peak": 2 * GIB,
        "tier_bytes_peak": {"device": 0, "host": GIB, "nvme": GIB},
        "written_bytes": GIB,
        "read_bytes": GIB,
        "write_bytes_per_s": 512 * MIB,
        "read_bytes_per_s": 1536 * MIB,
        "stall_ns": 1_200_000_000,
        "stall_bound_ns": 1_000_000_000,
        "phase_peak_bytes": {"A": 4 * GIB, "B": 5 * GIB, "C": 900},
        "left_asleep_bytes": 0,
        "declined": "",
        "stray_wakes": 0,
        "first_stray": "",
        **changes,
    }


def report(*prefixes: dict, **changes) -> StepReport:
    counts = {
        "prefix_tokens": 512,
        "recomputed_tokens": 0,
        "microbatch_tokens": 480,
        "microbatches": 2,
        "dummy_microbatches": 0,
    }
    return StepReport(1.25, counts, list(prefixes), **changes)


def advice(of: StepReport) -> list[str]:
    _, _, rest = str(of).partition("what to change:\n")
    return [line.removeprefix("- ") for line in rest.splitlines()]


def test_text_of_a_step_that_waits_for_the_file():
    assert str(report(prefix())) == (
        "loss 1.25; 512 tokens of 1 shared prefix, 480 of responses in 2 microbatches\n"
        "device memory: 5 GiB at most, in phase B (A 4 GiB, B 5 GiB, C 900 B)\n"
        "asleep: 2 GiB of 3 GiB that may sleep; at most 1 GiB in host memory, 1 GiB in the file\n"
        "waited: 1.2 s; at least 1 s at the best rates seen\n"
        "what to change:\n"
        "- phase B sets the peak: a smaller microbatch_tokens lowers it\n"
        "- the step waited 1.2 s for the file, which is read at 1.5 GiB/s: a larger "
        "host_budget_bytes, or a faster disk for nvme_dir"
    )


@pytest.mark.parametrize("phase", "ABC")
def test_the_phase_with_the_highest_peak_is_named(phase):
    peaks = {"A": 1, "B": 1, "C": 1} | {phase: 2}
    first, *_ = advice(report(prefix(phase_peak_bytes=peaks)))
    assert first.startswith(f"phase {phase} sets the peak: ")
    assert {"A": "alloc_budget_bytes", "B": "microbatch_tokens", "C": "window_layers"}[phase] in first


def test_waits_beyond_the_bound_want_memory_and_short_ones_nothing():
    _, long = advice(report(prefix(stall_ns=3_000_000_000)))
    assert "waited 3 s, 2 s more than copies need" in long and "window_layers" in long
    assert len(advice(report(prefix(stall_ns=999_999)))) == 1
    _, host = advice(report(prefix(read_bytes=0)))
    assert "from host memory" in host and "DORMOUSE_OFFLOAD_RESIDENCY=fit" in host


def test_strays_and_memory_that_did_not_wake_are_named():
    text = advice(
        report(
            prefix(), prefix(stray_wakes=2, first_stray="read in layer 3", left_asleep_bytes=MIB)
        )
    )
    assert any("2 accesses" in line and "read in layer 3" in line for line in text)
    assert any("1 MiB could not be woken" in line for line in text)


def test_reasons_are_listed_once_and_notes_up_to_a_limit():
    notes = [f"layer {n} differs" for n in range(NOTES_MAX + 3)]
    declined = prefix(declined="the disk is full")
    lines = str(report(declined, declined, notes=notes)).splitlines()
    awake = [line.removeprefix("awake: ") for line in lines if line.startswith("awake: ")]
    assert awake[:NOTES_MAX] == notes[:NOTES_MAX]
    assert awake[NOTES_MAX:] == ["3 more layers; report.notes has them", "the disk is full"]


def test_a_step_without_a_shared_prefix_says_so():
    text = str(report())
    assert "no prefix" in text and "waited" not in text and "asleep" not in text
    assert advice(report()) == [
        "no prefix was shared, so the step cost what a dense one does: group by prompt"
    ]


def test_a_step_all_of_whose_prefixes_were_exchanged_says_so():
    text = str(report(exchanged_prefixes=2))
    assert "tokens of no prefix of its own, " in text
    assert "exchanged: 2 prefixes, computed by this rank or received from another" in text
    assert advice(report(exchanged_prefixes=2)) == []
    assert "1 shared prefix, " in str(report(prefix(), exchanged_prefixes=1))


def test_scalars_sum_over_prefixes_and_take_the_largest_peak():
    scalars = report(prefix(), prefix(phase_peak_bytes={"A": 1, "B": 6 * GIB, "C": 7})).scalars()
    assert scalars["dormouse/stall_s"] == 2.4
    assert scalars["dormouse/file_read_bytes"] == 2 * GIB
    assert scalars["dormouse/peak_A_bytes"] == 4 * GIB
    assert scalars["dormouse/peak_B_bytes"] == 6 * GIB
    assert scalars["dormouse/microbatches"] == 2
    assert set(report(prefix()).scalars(prefix="")) == {name[9:] for name in scalars}


def test_a_real_step_explains_itself(runtime):
    wide = tiny(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
    done = SharedPrefix(wide, runtime).backward(group(600, (40, 24)), loss_fn)
    slept = done.prefix["asleep_bytes_peak"]
    assert slept > 0 and f"asleep: {in_units(slept)} of " in str(done)
    plain = json.loads(json.dumps(done.to_dict()))
    assert plain["prefixes"][0]["asleep_bytes_peak"] == slept
    assert plain["checked"]["rows"] == done.checked.rows
    scalars = done.scalars()
    assert scalars["dormouse/asleep_bytes_peak"] == slept
    assert all(type(value) is float and math.isfinite(value) for value in scalars.values())


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * MIB, "1.5 GiB"), (MIB - 1, "1024 KiB")],
)
def test_sizes(size_bytes, text):
    assert in_units(size_bytes) == text
