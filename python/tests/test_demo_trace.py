"""Recorded rollouts: what is in the repository, and what a file must not be."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from dormouse.demo import paths, record, trace

RECORDED = trace.read()


def made(**changes) -> trace.RolloutGroup:
    rollout = trace.Rollout([5, 6], "a b", [-1.0, -2.0], 1.0, 0.5)
    group = trace.RolloutGroup("g", "w", "q", [1, 2, 3], [rollout])
    return dataclasses.replace(group, **changes)


def test_the_default_group_is_the_largest_case():
    group = RECORDED.load()
    assert len(group.prompt) == max(len(RECORDED.load(g).prompt) for g in RECORDED.groups)
    assert record.choose_default([RECORDED.load(g) for g in RECORDED.groups]) == group.id


def test_there_are_enough_groups():
    assert len(RECORDED.groups) >= record.GROUPS_KEPT_MIN


@pytest.mark.parametrize("group_id", RECORDED.groups)
def test_every_recorded_group_can_be_trained_on(group_id):
    group = RECORDED.load(group_id)
    assert record.PROMPT_TOKENS_MIN <= len(group.prompt) <= record.PROMPT_TOKENS_MAX
    assert len(group.rollouts) == record.RESPONSES
    assert all(len(r.tokens) <= record.RESPONSE_TOKENS_MAX for r in group.rollouts)
    assert all(value <= 0.0 for r in group.rollouts for value in r.logprobs)
    expected = trace.advantages([r.reward for r in group.rollouts])
    assert any(expected)
    assert [r.advantage for r in group.rollouts] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("group_id", RECORDED.groups)
def test_every_recorded_reward_is_what_the_rules_say(group_id):
    from dormouse.demo import rewards

    asked = {q.id: q for q in record.questions()}[group_id]
    for rollout in RECORDED.load(group_id).rollouts:
        finished = len(rollout.tokens) < record.RESPONSE_TOKENS_MAX
        earned = {rewards.reward(rollout.text, asked.facts, finished=f) for f in (finished, True)}
        assert rollout.reward in earned


def test_every_passage_is_named_in_the_notice():
    notice = (paths.CHECKOUT / "NOTICE").read_text()
    for question in record.questions():
        family = question.id.split("-")[0]
        assert re.search(rf"^  {family}-\*", notice, re.MULTILINE), question.id


def test_write_then_read(tmp_path):
    groups = [made(), made(id="h", work='"quoted" ü')]
    written = trace.Trace({"id": "m"}, {"seed": 1}, "h", ["g", "h"], tmp_path)
    trace.write(written, groups)
    again = trace.read(tmp_path)
    assert again == written
    assert [again.load("g"), again.load()] == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [1]}, "prompt of 1 tokens; accepted: at least 2"),
        ({"rollouts": []}, "0 rollouts"),
        ({"rollouts": [trace.Rollout([], "", [], 0.0, 0.0)]}, "rollout 0 has 0 tokens"),
        ({"rollouts": [trace.Rollout([1, 2], "", [0.0], 0.0, 0.0)]}, "1 log-probabilities"),
        ({"rollouts": [trace.Rollout([1], "", [math.nan], 0.0, 0.0)]}, "has nan"),
        ({"rollouts": [trace.Rollout([1], "", [0.0], 0.0, math.inf)]}, "has inf"),
    ],
)
def test_bad_groups_are_refused(changes, message):
    with pytest.raises(trace.TraceError, match=message):
        trace.check(made(**changes), "here")


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(trace.TraceError, match="is missing"):
        trace.read(tmp_path)
    index = tmp_path / trace.INDEX_FILE
    index.write_text("{")
    with pytest.raises(trace.TraceError, match="is not JSON"):
        trace.read(tmp_path)
    index.write_text(json.dumps({"format": 99}))
    with pytest.raises(trace.TraceError, match="format 99; accepted: 1"):
        trace.read(tmp_path)
    with pytest.raises(trace.TraceError, match="'nobody' is not recorded; accepted: alice"):
        RECORDED.load("nobody")


def test_advantages():
    scores = trace.advantages([0.0, 0.0, 1.0, 1.0])
    assert sum(scores) == pytest.approx(0.0)
    assert scores[2] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-4))
    assert trace.advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert trace.advantages([0.3]) == [0.0]
