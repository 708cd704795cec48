"""Seconds of a check and microseconds of a fingerprint, on SmolLM2-135M: JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import peft  # noqa: E402
import torch  # noqa: E402

import dormouse  # noqa: E402
from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.hf import SharedPrefix  # noqa: E402
from dormouse.hf.fingerprint import Fingerprint  # noqa: E402

REPEATS = 5
# A fingerprint is compared in less than a clock's noise.
COMPARISONS = 100
LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def fingerprint_us(model: torch.nn.Module) -> float:
    """Returns the microseconds in which an unchanged model is recognised."""
    fingerprint = Fingerprint(model)
    microseconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(COMPARISONS):
            assert fingerprint.matches()
        microseconds.append((time.perf_counter() - start) / COMPARISONS * 1e6)
    return median(microseconds)


def main() -> None:
    model = demo_model.load_model(demo_model.find())
    with dormouse.Runtime() as runtime:
        shared = SharedPrefix(model, runtime)
        shared.check()
        checks = [shared.check().seconds for _ in range(REPEATS)]
    plain_us = fingerprint_us(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    figures = {
        "check_seconds": median(checks),
        "fingerprint_us": plain_us,
        "fingerprint_lora_us": fingerprint_us(adapted),
        "lora_modules": sum(1 for _ in adapted.modules()),
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
