"""Rows of how near a simulated step is to a measured one: seconds and bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rows import LOWER, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

from dormouse.schedule import query  # noqa: E402

PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"
STEPS = Path(__file__).with_name("steps.py")
REPEATS = 5
NS_PER_S = 1e9

# Relative tolerance, or this multiple of the spread of repeats.
SECONDS_TOLERANCE = 0.10
SPREADS = 2
# Repeats that lie farther apart measure the machine: the bar would be met by any simulation.
SPREAD_MAX = 0.1
BYTES_TOLERANCE = 0.03

# The model of steps.py.
LAYERS, KV_HEADS, HEAD_DIM, VOCAB, DTYPE_BYTES = 8, 5, 64, 4096, 4
# K and V with their FP32 accumulators; logits, their log-softmax and its gradient.
BOUNDARY_ROW_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * (DTYPE_BYTES + 4)
LOGITS_ROW_BYTES = 3 * VOCAB * DTYPE_BYTES
# The last layer's prefix rows save nothing (docs/method.md §4).
LIVE_LAYERS = LAYERS - 1


@dataclass(frozen=True)
class Shape:
    """A rollout group: tokens of the prompt and of each response, rows of a microbatch."""

    prompt: int
    responses: tuple[int, ...]
    microbatch_tokens: int

    @property
    def prefix(self) -> int:
        return self.prompt - 1

    def microbatches(self) -> list[list[int]]:
        """Rows of each microbatch's members, by the plan."""
        answer = query(
            "plan",
            forest={
                "parents": [None] + [0] * len(self.responses),
                "lengths": [self.prompt, *self.responses],
            },
            scoring=[{"loss": {"from": self.prompt}, "weight": 1.0} for _ in self.responses],
            options={
                "vocab": VOCAB,
                "microbatch_rows": self.microbatch_tokens,
                "last_layer_dead": True,
                "always_share": True,
                "runtime_residency": True,
                "model": MODEL,
            },
        )
        microbatches = [op["members"] for op in answer["ops"] if op["kind"] == "microbatch"]
        return [[m["rows"]["end"] - m["rows"]["begin"] for m in microbatch] for microbatch in microbatches]


MODEL = {
    "layers": LAYERS,
    "heads": 5,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "dtype_bytes": DTYPE_BYTES,
    "layer_linear_weights": 4 * 320 * 320 + 3 * 320 * 960,
    "kv_linear_weights": 2 * 320 * 320,
    "last_layer_prefix_weights": 2 * 320 * 320,
    "head_weights": 320 * VOCAB,
    "saved_bytes_per_token_layer": 0,
}

FITTED = (
    Shape(256, (64,) * 4, 128),
    Shape(512, (64,) * 8, 256),
    Shape(512, (128,) * 4, 256),
    Shape(768, (96,) * 6, 192),
    Shape(1024, (32,) * 8, 128),
    Shape(1024, (128,) * 4, 512),
    Shape(256, (160,) * 6, 320),
    Shape(1536, (64,) * 4, 128),
    Shape(1536, (96,) * 6, 192),
    Shape(640, (48, 64, 80, 96, 112, 128), 256),
    Shape(384, (256,) * 3, 256),
    Shape(1280, (24,) * 12, 144),
)
# Larger than any of those, and of other proportions.
HELD_OUT = (Shape(2048, (112,) * 8, 224), Shape(896, (128,) * 9, 384))
# Of this one bytes are learnt.
CALIBRATION = FITTED[5]


def part(rows: int, before: int, logits: int, **counts: int) -> dict:
    """Features of rows run behind ``before`` others."""
    return {
        "rows": rows,
        "prefix_pairs": rows * before,
        "causal_pairs": rows * (rows + 1) // 2,
        "logit_rows": logits,
        **counts,
    }


def parts(shape: Shape) -> list[dict]:
    """Features of what a step does, in order: its prefix, then each microbatch."""
    found = [part(shape.prefix, 0, 0, nodes=1, steps=1)]
    for microbatch in shape.microbatches():
        members = [part(rows, shape.prefix, rows, leaves=1) for rows in microbatch]
        found.append(total([*members, {"microbatches": 1}]))
    return found


def total(features: list[dict]) -> dict:
    names = {name for one in features for name in one}
    return {name: sum(one.get(name, 0) for one in features) for name in names}


def measured(shapes: tuple[Shape, ...]) -> dict[Shape, dict]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "LD_PRELOAD": str(PRELOAD),
    }
    lines = [json.dumps(shape.__dict__) + "\n" for shape in shapes]
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as files:
        command = [sys.executable, str(STEPS), files, str(REPEATS)]
        done = subprocess.run(
            command, input="".join(lines), env=environment, text=True, stdout=subprocess.PIPE, check=True
        )
    return dict(zip(shapes, map(json.loads, done.stdout.splitlines()), strict=True))


@dataclass(frozen=True)
class Learnt:
    """What one kind of row costs, from measured steps."""

    rates: dict[str, float]
    saved_row_bytes: float
    """Saved by one layer for one row's backward."""
    wakeful_row_bytes: float
    """Of a prefix row, what may not sleep."""

    @classmethod
    def of(cls, steps: dict[Shape, dict]) -> Learnt:
        samples = [
            {"features": total(parts(shape)), "seconds": median(steps[shape]["seconds"])}
            for shape in FITTED
        ]
        fit = query("fit", samples=samples, weighting="relative")
        seen, rows = steps[CALIBRATION], CALIBRATION.prefix
        saved = seen["prefix_bytes"] - rows * BOUNDARY_ROW_BYTES
        return cls(
            fit["rates"],
            saved / rows / LIVE_LAYERS,
            (saved - seen["dormant_bytes"]) / rows,
        )

    def simulated(self, shape: Shape, *, asleep: bool) -> dict:
        """The step in the simulator; asleep, all that may has left before the first microbatch."""
        rows = shape.prefix
        saved = rows * (self.wakeful_row_bytes if asleep else LIVE_LAYERS * self.saved_row_bytes)
        prefix, *microbatches = parts(shape)
        microbatch_row = LAYERS * self.saved_row_bytes + LOGITS_ROW_BYTES
        block_bytes = [saved, rows * BOUNDARY_ROW_BYTES]
        block_bytes += [microbatch["rows"] * microbatch_row for microbatch in microbatches]
        node_ns = self._ns(prefix)
        steps = [{"compute_ns": node_ns // 3, "allocates": [0, 1]}]
        for block, microbatch in enumerate(microbatches, start=2):
            lives = {"needs": [1], "allocates": [block], "frees": [block]}
            steps.append({"compute_ns": self._ns(microbatch), **lives})
        steps.append({"compute_ns": node_ns - node_ns // 3, "needs": [0, 1], "frees": [0, 1]})
        rank = {"block_bytes": [round(n) for n in block_bytes], "steps": steps}
        return query("simulate", world={"ranks": [rank]})

    def _ns(self, features: dict) -> int:
        return round(NS_PER_S * sum(self.rates[name] * n for name, n in features.items()))


def far(predicted: float, seen: float) -> float:
    """How many times one is the other, the larger over the smaller."""
    return max(predicted / seen, seen / predicted)


def steps() -> list[Row]:
    found = measured(FITTED + HELD_OUT)
    learnt = Learnt.of(found)
    return [_seconds(found, learnt), _bytes(found, learnt)]


def _seconds(found: dict[Shape, dict], learnt: Learnt) -> Row:
    ratios, spreads = [], []
    for shape in HELD_OUT:
        seconds = found[shape]["seconds"]
        spreads.append((max(seconds) - min(seconds)) / median(seconds))
        simulated_s = learnt.simulated(shape, asleep=False)["total_ns"] / NS_PER_S
        ratios.append(simulated_s / median(seconds))
    worst = max(ratios, key=lambda ratio: far(ratio, 1))
    bar = 1 + max(SECONDS_TOLERANCE, SPREADS * max(spreads))
    how = (
        f"CPU seconds of a step, one thread, a Llama of {LAYERS} layers; simulated with a cost model "
        f"fitted to {len(FITTED)} shapes, on {len(HELD_OUT)} larger ones it was not fitted to; the "
        f"larger over the smaller, the worst: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; "
        f"repeats of {REPEATS} lie {max(spreads):.3f} apart"
    )
    row = Row("simulated_over_measured", "ratio", LOWER, how, bar=bar)
    if max(spreads) <= SPREAD_MAX:
        row.ours = far(worst, 1)
    else:
        row.note("ours", f"repeats lie more than {SPREAD_MAX} apart")
    return row


def _bytes(found: dict[Shape, dict], learnt: Learnt) -> Row:
    ratios = {}
    for shape in HELD_OUT:
        seen, name = found[shape], f"prompt {shape.prompt}"
        step_bytes = max(seen["awake_bytes"].values())
        for asleep, bytes_seen in ((False, step_bytes), (True, seen["asleep_bytes"])):
            simulated = learnt.simulated(shape, asleep=asleep)
            peak = simulated["ranks"][0]["peak"]["device_bytes"]
            ratios[f"{name}, {'asleep' if asleep else 'awake'}"] = peak / bytes_seen
    how = (
        "most bytes of a step as simulated over what the library tracked, everything awake and (in "
        "phase B, settled) asleep, on the shapes not learnt from; the larger over the smaller, the "
        f"worst: {', '.join(f'{name} {ratio:.3f}' for name, ratio in ratios.items())}"
    )
    worst = max(far(ratio, 1) for ratio in ratios.values())
    return Row("peak_predicted_over_measured", "ratio", LOWER, how, worst, 1 + BYTES_TOLERANCE)


MAKERS: list[tuple[list[str], Callable[[], list[Row]]]] = [
    (["simulated_over_measured", "peak_predicted_over_measured"], steps),
]
