"""Bars of what a pair costs."""

from __future__ import annotations

import setting
import speed
from contenders import NATIVE, OURS


def test_the_cold_churn_is_judged_by_torch_of_the_same_run(monkeypatch):
    seconds = {OURS.name: 2.0, NATIVE.name: 1.0}

    def result(_setting, one, _cost_ns):
        return {"ns": seconds[one.name] * 1e9, "warmup_ns": 0, "pairs": 1}

    monkeypatch.setattr(speed, "churn_timed", result)
    monkeypatch.setattr(setting, "build", lambda one: None)
    both = setting.Setting(setting.Sizes(), (OURS, NATIVE))
    row = speed.churn_cold_ns(both, "cold")
    assert row.bar == row.peers[NATIVE.name] == row.ours / 2
    assert row.met is False
    seconds[OURS.name] = 1.0
    assert speed.churn_cold_ns(both, "cold").met is True
