"""Rows of histories of dialogues: recall and time of retrievals, tokens that ordered passages save."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

from rows import HIGHER, LOWER, Row

from dormouse.history import Dialogue

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target" / "release" / "examples" / "dialogue"
EXAMPLE = ROOT / "examples" / "history" / "multi_turn.py"
# Entries, numbers of an embedding, entries looked at; α.
ENTRIES, SCANNED, ALPHA = 100_000, 2048, 0.5
# How rows of a shape end: numbers of an embedding, topics, length of what sets an entry apart from its topic.
SHAPES = {"": (384, 1000, 1.0), "_256": (256, 1000, 1.0), "_unstructured": (384, 0, 1.0)}
RECALL_BAR, MS_BAR = 0.95, 1.0


def names(shape: str) -> list[str]:
    return [f"retrieval_recall{shape}", f"retrieval_ms{shape}"]


def retrieval_rows(shape: str) -> list[Row]:
    dimension, topics, noise = SHAPES[shape]
    how = (
        f"{ENTRIES} entries of {dimension} numbers, {topics or 'no'} topics, noise {noise}, α {ALPHA}, "
        f"10 retrieved of {SCANNED} looked at, against an exact scan"
    )
    recall, ms = (
        Row(name, unit, better, how)
        for name, unit, better in zip(names(shape), ("share", "ms"), (HIGHER, LOWER), strict=True)
    )
    # No index serves directions without a structure: their rows have no bar.
    if topics:
        recall.bar, ms.bar = RECALL_BAR, MS_BAR
    numbers = (ENTRIES, dimension, SCANNED, topics, noise, ALPHA)
    if not PROGRAM.exists():
        for row in (recall, ms):
            row.note("ours", "cargo build --release -p dormouse-history --examples comes first")
        return [recall, ms]
    command = [str(PROGRAM), *(str(number) for number in numbers)]
    figures = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    recall.ours, ms.ours = figures["recall"], figures["retrieval_ms"]
    ms.how += (
        f"; median of 200; exact {figures['exact_ms']:.1f} ms, p99 {figures['retrieval_p99_ms']:.1f} "
        f"ms; a record {figures['record_us']:.0f} µs in calls of 1024, the longest call "
        f"{figures['longest_record_ms']:.0f} ms"
    )
    return [recall, ms]


def sharing_rows() -> list[Row]:
    """Of the example's batch, tokens computed over those of every conversation by itself."""
    spec = importlib.util.spec_from_file_location("multi_turn", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with Dialogue(example.DIMENSION, alpha=0.8) as history:
        example.fill(history)
        given, plain = example.computed(example.batch(history, ordered=False))
        ordered, _ = example.computed(example.batch(history, ordered=True))
    how = f"tokens of examples/history: {ordered} ordered, {given} as retrieved, {plain} plain"
    row = Row("shared_tokens_over_plain", "ratio", LOWER, how, ours=ordered / plain)
    row.peers["as_retrieved"] = given / plain
    return [row]


MAKERS = [
    *((names(shape), lambda shape=shape: retrieval_rows(shape)) for shape in SHAPES),
    (["shared_tokens_over_plain"], sharing_rows),
]
