"""Verdicts and rows of the survey, without its models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time

import bench
import pytest
import zoo
from zoo import EXACT, REFUSED, UNBUILT, WRONG, Verdict

KIND = "mistral"
SHORT, LONG = zoo.LIMITS


@pytest.mark.parametrize(
    ("of_limits", "verdict"),
    [
        ({SHORT: EXACT, LONG: EXACT}, EXACT),
        ({SHORT: EXACT, LONG: WRONG}, WRONG),
        ({SHORT: EXACT, LONG: REFUSED}, REFUSED),
        ({SHORT: WRONG, LONG: EXACT}, WRONG),
        ({SHORT: WRONG, LONG: REFUSED}, WRONG),
        ({SHORT: WRONG, LONG: UNBUILT}, WRONG),
        ({SHORT: REFUSED, None: EXACT}, REFUSED),
        ({SHORT: REFUSED, None: WRONG}, WRONG),
    ],
)
def test_a_wrong_step_under_any_limit_is_wrong(monkeypatch, of_limits, verdict) -> None:
    def found(kind: str, limit: int | None, tell) -> Verdict:
        distance = 0.0 if of_limits[limit] == EXACT else None
        return Verdict(kind, kind, of_limits[limit], distance)

    monkeypatch.setattr(zoo, "_judge", found)
    monkeypatch.setattr(zoo, "_is_limited", lambda kind: True)
    assert zoo.judge(KIND, lambda verdict: None).verdict == verdict


@pytest.mark.parametrize("told", [UNBUILT, WRONG])
@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: time.sleep(60)])
def test_a_process_that_ends_or_hangs_is_what_it_said_it_would_be(monkeypatch, told, end) -> None:
    def judge(kind: str, tell) -> Verdict:
        tell(told)
        end()

    monkeypatch.setattr(zoo, "judge", judge)
    monkeypatch.setattr(zoo, "SECONDS_MAX", 2)
    assert zoo._apart(KIND).verdict == told


def test_a_step_beside_zero_gradients_is_wrong(monkeypatch) -> None:
    class Step:
        def __init__(self, model, runtime, sleep: bool) -> None:
            pass

        def backward(self, *args, **named) -> None:
            pass

    told, verdict = [], Verdict(KIND, KIND)
    monkeypatch.setattr(zoo, "SharedPrefix", Step)
    monkeypatch.setattr(zoo, "dense_backward", lambda model, case: None)
    monkeypatch.setattr(zoo, "take_gradients", lambda model: {"weight": zoo.torch.zeros(2)})
    zoo._compare(None, None, verdict, told.append)
    assert (verdict.verdict, told) == (WRONG, [WRONG])
    assert "all gradients are zero" in verdict.reason


def answers(monkeypatch, answer) -> None:
    """Has each process print the answer."""
    done = subprocess.CompletedProcess([], 0, json.dumps(answer), "")
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **named: done)


def test_a_prediction_that_is_no_number_is_the_worst(monkeypatch) -> None:
    def case(name: str, predicted: float) -> dict:
        pair = {"predicted": predicted, "measured": 1.0}
        return {"case": name, **dict.fromkeys(("dense", "shared", "speedup"), pair)}

    answers(monkeypatch, [case("one", 1.05), case("two", math.nan), case("three", 1.01)])
    row = next(row for row in bench.prediction_rows() if row.bar is not None)
    assert row.met is False and "worst: two" in row.how


@pytest.mark.parametrize(("tokens", "met"), [(100, True), (0, False), (101, False)])
def test_a_step_without_rows_meets_no_bar(monkeypatch, tokens: int, met: bool) -> None:
    answers(monkeypatch, {
        "tokens": tokens,
        "distinct_tokens": 100,
        "dense_tokens": 300,
        "conversations": 2,
        "speedup": 2.0,
        "peak_bytes": 100,
        "prediction": {"speedup": 2.0, "device_bytes": [100]},
    })
    assert bench.tree_rows()[0].met is met
