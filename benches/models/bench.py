#!/usr/bin/env python3
"""Which architectures share a prefix exactly, and what finding out costs.

    .venv/bin/python benches/models/bench.py                   # all rows, and docs/models.md
    .venv/bin/python benches/models/bench.py --only 'check_*'  # some rows
    .venv/bin/python benches/models/bench.py --kinds llama,glm # these alone; writes nothing

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

# Before any import of transformers: nothing is fetched.
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

import document
import zoo
from rows import HIGHER, LOWER, Row, measure

OUT = ROOT / "target" / "bench" / "models.json"
VERDICTS = OUT.with_name("models-verdicts.json")
TIMING = Path(__file__).with_name("timing.py")
TREES = Path(__file__).with_name("trees.py")
PREDICTION = Path(__file__).with_name("prediction.py")
STANDARD = Path(__file__).with_name("standard.py")
STANDARD_CASES = OUT.with_name("models-standard.json")
PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"

CHECK_SECONDS = 2.0
FINGERPRINT_US = 1000.0
TREE_SPEEDUP_MIN = 0.9
TREE_PEAK_MAX = 1.03

SURVEY_ROWS = (
    *("architectures_exact", "architectures_refused", "architectures_unbuilt"),
    *("silently_wrong", "fp64_distance_worst"),
)
TIMING_ROWS = ("check_seconds", "fingerprint_us", "fingerprint_lora_us")
STANDARD_ROWS = (
    *("standard_fp32_outside", "standard_fp32_global_worst"),
    *("standard_bf16_outside", "standard_bf16_global_worst"),
)
PREDICTION_MAX = 0.1
PREDICTION_ROWS = tuple(
    f"prediction_error_{what}_{which}"
    for what in ("dense", "shared", "speedup")
    for which in ("median", "worst")
)
TREE_ROWS = ("tree_tokens_over_plan", "tree_speedup_over_predicted", "tree_peak_over_predicted")


def main() -> int:
    arguments = parse()
    if arguments.kinds:
        for verdict in zoo.survey(arguments.kinds.split(",")):
            print(line_of(verdict), verdict.error, flush=True)
        return 0
    makers = [
        (SURVEY_ROWS, survey_rows),
        (TIMING_ROWS, timing_rows),
        (TREE_ROWS, tree_rows),
        (STANDARD_ROWS, standard_rows),
        (PREDICTION_ROWS, prediction_rows),
    ]
    return measure(makers, arguments.only, OUT)


def survey_rows() -> list[Row]:
    """The verdicts; writes docs/models.md."""
    start = time.monotonic()
    verdicts = []
    for verdict in zoo.survey():
        print(line_of(verdict), file=sys.stderr, flush=True)
        verdicts.append(verdict)
    document.write(verdicts)
    VERDICTS.parent.mkdir(parents=True, exist_ok=True)
    VERDICTS.write_text(json.dumps([zoo.asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    how = f"of {len(verdicts)} model types, in {time.monotonic() - start:.0f} s; docs/models.md"

    def count(name: str, kind: str, better: str, bar: float | None = None) -> Row:
        number = sum(verdict.verdict == kind for verdict in verdicts)
        return Row(name, "architectures", better, how, ours=number, bar=bar)

    exact = [verdict for verdict in verdicts if verdict.verdict == zoo.EXACT]
    worst = max(exact, key=lambda verdict: verdict.distance, default=None)
    return [
        count("architectures_exact", zoo.EXACT, HIGHER),
        count("architectures_refused", zoo.REFUSED, LOWER),
        count("architectures_unbuilt", zoo.UNBUILT, LOWER),
        count("silently_wrong", zoo.WRONG, LOWER, bar=0),
        Row(
            "fp64_distance_worst",
            "relative",
            LOWER,
            "largest distance of an exact architecture's gradients from the dense ones"
            + (f": {worst.model_type}" if worst else ""),
            ours=worst.distance if worst else None,
            bar=zoo.FP64_BOUND,
        ),
    ]


def timing_rows() -> list[Row]:
    """What a check and the test for changes cost."""
    # A process of its own: the survey leaves one thread.
    result = subprocess.run([sys.executable, TIMING], capture_output=True, text=True)
    if result.returncode:
        rows = [
            Row("check_seconds", "s", LOWER, "", bar=CHECK_SECONDS),
            Row("fingerprint_us", "us", LOWER, "", bar=FINGERPRINT_US),
            Row("fingerprint_lora_us", "us", LOWER, "", bar=FINGERPRINT_US),
        ]
        for row in rows:
            row.note("ours", result.stderr.strip().splitlines()[-1])
        return rows
    figures = json.loads(result.stdout.splitlines()[-1])
    what = f"SmolLM2-135M, {figures['threads']} threads, median of 5"
    return [
        Row(
            "check_seconds",
            "s",
            LOWER,
            f"SharedPrefix.check(); {what}",
            ours=figures["check_seconds"],
            bar=CHECK_SECONDS,
        ),
        Row(
            "fingerprint_us",
            "us",
            LOWER,
            f"Fingerprint.matches(), as before every step; {what}",
            ours=figures["fingerprint_us"],
            bar=FINGERPRINT_US,
        ),
        Row(
            "fingerprint_lora_us",
            "us",
            LOWER,
            f"the same with LoRA on all linear layers: {figures['lora_modules']} modules; {what}",
            ours=figures["fingerprint_lora_us"],
            bar=FINGERPRINT_US,
        ),
    ]


def tree_rows() -> list[Row]:
    """A step over the recorded branching batch."""
    environment = os.environ | {"LD_PRELOAD": str(PRELOAD)}
    result = subprocess.run(
        [sys.executable, TREES], capture_output=True, text=True, env=environment
    )
    bars = (1.0, TREE_SPEEDUP_MIN, TREE_PEAK_MAX)
    rows = [
        Row(name, "ratio", better, "", bar=bar)
        for name, better, bar in zip(TREE_ROWS, (LOWER, HIGHER, LOWER), bars, strict=True)
    ]
    if result.returncode:
        for row in rows:
            row.note("ours", result.stderr.strip().splitlines()[-1])
        return rows
    figures = json.loads(result.stdout.splitlines()[-1])
    tokens, speed, peak = rows
    prediction = figures["prediction"]
    what = f"SmolLM2-135M, turns.json: {figures['conversations']} conversations of two turns"
    tokens.how = f"rows run over distinct prefixes; {what}; dense {figures['dense_tokens']} rows"
    if figures["tokens"]:
        tokens.ours = figures["tokens"] / figures["distinct_tokens"]
    else:
        tokens.note("ours", "the step ran no rows")
    speed.ours = figures["speedup"] / prediction["speedup"]
    speed.how = (
        f"dense over shared seconds, {figures['speedup']:.2f}, over those predicted from measured "
        f"rates, {prediction['speedup']:.2f}; {what}; rounds in turn"
    )
    predicted = max(prediction["device_bytes"])
    peak.ours = max(predicted / figures["peak_bytes"], figures["peak_bytes"] / predicted)
    peak.how = (
        f"predicted peak {predicted / 2**20:.0f} MiB, tracked {figures['peak_bytes'] / 2**20:.0f} "
        "MiB, everything awake; the larger over the smaller; bytes per token and layer measured on "
        f"a group; {what}"
    )
    return rows


def standard_rows() -> list[Row]:
    """Distances to FP64 beside those of the dense run; writes each case."""
    result = subprocess.run([sys.executable, STANDARD], stdout=subprocess.PIPE, text=True)
    rows = []
    cases = json.loads(result.stdout) if result.returncode == 0 else []
    STANDARD_CASES.parent.mkdir(parents=True, exist_ok=True)
    STANDARD_CASES.write_text(json.dumps(cases, indent=1) + "\n")
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        own = [case for case in cases if case["dtype"] == dtype]
        outside = [case for case in own if not case["within_bounds"]]
        worst = max(own, key=lambda case: case["ratio_global"], default=None)
        how = f"{len(own)} cases of {len({case['kind'] for case in own})} architectures"
        count = Row(f"standard_{short}_outside", "cases", LOWER, how, bar=0)
        ratio = Row(f"standard_{short}_global_worst", "ratio", LOWER, how)
        if worst is not None:
            count.ours, ratio.ours = len(outside), worst["ratio_global"]
            named = [f"{c['kind']} P={c['prompt_tokens']} N={c['responses']}" for c in outside]
            count.how += " outside method §10's bounds: " + (", ".join(named) or "none")
            ratio.how += (
                f", largest distance of shared over dense: {worst['kind']}, P = "
                f"{worst['prompt_tokens']}, N = {worst['responses']}, dense {worst['dense_global']:.1e}"
            )
        else:
            for row in (count, ratio):
                row.note("ours", f"standard.py ended with status {result.returncode}")
        rows += [count, ratio]
    return rows


def prediction_rows() -> list[Row]:
    """Predicted seconds beside measured ones, on shapes that the rates were not fitted to."""
    result = subprocess.run([sys.executable, PREDICTION], stdout=subprocess.PIPE, text=True)
    cases = json.loads(result.stdout) if result.returncode == 0 else []
    rows = []
    for what in ("dense", "shared", "speedup"):
        errors = [
            (abs(case[what]["predicted"] / case[what]["measured"] - 1), case["case"])
            for case in cases
        ]
        how = f"|predicted / measured - 1| of {what}, {len(errors)} shapes, medians of rounds in turn"
        middle = Row(f"prediction_error_{what}_median", "ratio", LOWER, how)
        bar = PREDICTION_MAX if what == "speedup" else None
        worst = Row(f"prediction_error_{what}_worst", "ratio", LOWER, how, bar=bar)
        if errors:
            middle.ours = median(error for error, _ in errors)
            # A NaN is the worst: ``max`` alone would drop it.
            worst.ours, case = max(errors, key=lambda each: (math.isnan(each[0]), each))
            worst.how += f"; worst: {case}"
        else:
            for row in (middle, worst):
                row.note("ours", f"prediction.py ended with status {result.returncode}")
        rows += [middle, worst]
    return rows


def line_of(verdict: zoo.Verdict) -> str:
    """A verdict as a line of text."""
    distance = "" if verdict.distance is None else f"{verdict.distance:.1e}"
    text = "; ".join([verdict.reason] * bool(verdict.reason) + verdict.notes)
    return f"{verdict.model_type:26} {verdict.verdict:9} {distance:8} {text}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of rows, with wildcards, by commas")
    parser.add_argument("--kinds", default="", help="model types, by commas; prints their verdicts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
