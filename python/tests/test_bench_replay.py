"""The replay of benches/replay on a tiny model in FP64: all ways agree; an ended run goes on."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import ROOT
from models import tiny
from transformers import LlamaForCausalLM

sys.path.append(str(ROOT / "benches" / "replay"))

import updates  # noqa: E402

SIZE = {"prompt_tokens": 12, "responses": 3, "response_tokens": 5}
# Ids of the recorded tokens.
VOCAB = 49152


class NoSampler:
    """In place of one that needs the real tokenizer."""

    def __init__(self, tokenizer, batches):
        pass

    def samples(self, model) -> list[dict]:
        return [{"tokens": [1], "text": "", "reward": 0.0}]


@pytest.fixture
def a_replay(monkeypatch, runtime, tmp_path):
    def load_model(source) -> LlamaForCausalLM:
        return tiny(vocab_size=VOCAB, num_hidden_layers=3)

    monkeypatch.setattr(updates.demo_model, "find", lambda: None)
    monkeypatch.setattr(updates.demo_model, "load_model", load_model)
    monkeypatch.setattr(updates.demo_model, "load_tokenizer", lambda source: None)
    monkeypatch.setattr(updates, "Sampler", NoSampler)
    monkeypatch.setattr(updates, "CHECKPOINT_UPDATES", 2)

    def make(name: str) -> updates.Replay:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        settings = updates.Settings(str(directory), 5, 2, updates.FP32, SIZE)
        return updates.Replay(settings, runtime)

    return make


def lines_of(tmp_path, name: str) -> list[dict]:
    lines = (tmp_path / name / updates.UPDATES_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_all_ways_agree_and_an_ended_run_goes_on(a_replay, tmp_path, monkeypatch):
    a_replay("whole").run()
    whole = lines_of(tmp_path, "whole")
    assert len({each["group"] for each in whole}) == 5
    for each in whole:
        assert each["from_start"] > 1e-6
        for name in ("split", "shared"):
            assert each["from_dense"][name] < 1e-9 * each["from_start"]
            assert each["loss"][name] == pytest.approx(each["loss"]["dense"], rel=1e-9, abs=1e-12)
            assert each["norm"][name] == pytest.approx(each["norm"]["dense"], rel=1e-9)
        assert each["from_truth"]["dense"] == 0

    ended = a_replay("ended")
    update = ended._update

    def cut(number: int) -> dict:
        if number == 3:
            raise KeyboardInterrupt
        return update(number)

    monkeypatch.setattr(ended, "_update", cut)
    with pytest.raises(KeyboardInterrupt):
        ended.run()
    assert len(lines_of(tmp_path, "ended")) == 3, "one more than its checkpoint has"
    a_replay("ended").run()
    assert lines_of(tmp_path, "ended") == whole
    end = json.loads((tmp_path / "ended" / updates.END_FILE).read_text())
    assert end == json.loads((tmp_path / "whole" / updates.END_FILE).read_text())
    assert not (tmp_path / "ended" / updates.STATE_FILE).exists()
