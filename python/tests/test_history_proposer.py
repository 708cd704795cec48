"""Drafts in the shape of vLLM's and SGLang's proposers, called by stand-ins of their loops.

A stand-in engine keeps what vLLM's input batch and SGLang's requests have, and accepts of a draft
what an exact copy of the recorded response has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

import dormouse
from dormouse.history import History
from dormouse.history.proposer import HistoryCorpus, HistoryProposer, Request

VOCAB, LENGTH_MAX = 500, 96
PROMPTS = {"a": list(range(20, 33)), "b": list(range(60, 66)), "c": [7]}
RESPONSES = {
    "a": [100 + at * at % 97 for at in range(40)],
    "b": [200 + at * 5 % 89 for at in range(25)],
    "c": [300 + at * 7 % 83 for at in range(33)],
}


@pytest.fixture
def history():
    with History(VOCAB) as history:
        for name, prompt in PROMPTS.items():
            history.record(prompt, RESPONSES[name])
        yield history


def accepted(draft: list[int], rest: list[int]) -> int:
    equal = 0
    while equal < min(len(draft), len(rest) - 1) and draft[equal] == rest[equal]:
        equal += 1
    return equal


@dataclass
class VllmEngine:
    """Rows move when requests end, as in vLLM: the last one takes the place that became free."""

    proposer: HistoryProposer
    wanted: dict[str, list[int]]
    prompts: dict[str, list[int]]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        self.rows = list(self.wanted)
        self.tokens = {name: list(self.prompts[name]) for name in self.rows}

    def step(self, reading: frozenset = frozenset()):
        """One forward; of the requests in ``reading`` a part of the prompt."""
        sampled = []
        for name in self.rows:
            if name in reading:
                sampled.append([])
                continue
            rest = self.wanted[name][len(self.tokens[name]) - len(self.prompts[name]) :]
            new = rest[: accepted(self.drafts.get(name, []), rest) + 1]
            self.tokens[name] += new
            sampled.append(new)
            self.steps[name] = self.steps.get(name, 0) + 1
        ids = np.zeros((len(self.rows), LENGTH_MAX), dtype=np.int32)
        for row, name in enumerate(self.rows):
            ids[row, : len(self.tokens[name])] = self.tokens[name]
        batch = SimpleNamespace(
            req_ids=list(self.rows),
            req_id_to_index={name: row for row, name in enumerate(self.rows)},
            num_prompt_tokens=np.array([len(self.prompts[name]) for name in self.rows]),
            num_tokens_no_spec=np.array([len(self.tokens[name]) for name in self.rows]),
            token_ids_cpu=ids,
        )
        drafts = self.proposer.propose(batch, sampled, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        self.drafts = dict(zip(self.rows, drafts, strict=True))
        for name in list(self.rows):
            if len(self.tokens[name]) == len(self.prompts[name]) + len(self.wanted[name]):
                self.done[name] = self.tokens.pop(name)[len(self.prompts[name]) :]
                last = self.rows.pop()
                if last != name:
                    self.rows[self.rows.index(name)] = last

    def run(self):
        while self.rows:
            self.step()
        self.step()


def test_a_batch_takes_the_forwards_of_windows_that_grow(history):
    engine = VllmEngine(HistoryProposer(history, 32, LENGTH_MAX), RESPONSES, PROMPTS)
    engine.run()
    assert engine.done == RESPONSES
    # The prompt's forward yields one token, further ones 3 + 5 + 7 + …, and the rest. With a prompt
    # of one token, the first two forwards have too little to match.
    assert engine.steps == {"a": 7, "b": 5, "c": 7}
    assert engine.proposer.requests == 0
    stats = history.stats()
    # Of a and c the last token was drafted, and is the model's own.
    assert stats["drafted_tokens"] - stats["accepted_tokens"] == 2
    assert stats["accepted_tokens"] == sum(map(len, RESPONSES.values())) - 7 - 5 - 7


def test_a_rejection_shrinks_the_window(history):
    wrong = RESPONSES["a"].copy()
    wrong[20] = 499
    engine = VllmEngine(HistoryProposer(history, 32, LENGTH_MAX), {"a": wrong}, PROMPTS)
    lengths = []
    while engine.rows:
        engine.step()
        lengths.append(len(engine.drafts["a"]))
    assert engine.done == {"a": wrong}
    assert lengths[:4] == [2, 4, 6, 8]
    # Tokens 16 to 24 were drafted, of which 4 came; 3 tokens behind the change match again.
    assert lengths[4] == 0 and 2 in lengths[5:]
    stats = history.stats()
    # And the last token was drafted, and is the model's own.
    assert stats["drafted_tokens"] - stats["accepted_tokens"] == 4 + 1


def test_prompts_that_are_still_read_have_no_draft(history):
    engine = VllmEngine(HistoryProposer(history, 32, LENGTH_MAX), RESPONSES, PROMPTS)
    engine.step(reading=frozenset("ac"))
    assert engine.drafts["a"] == engine.drafts["c"] == [] and len(engine.drafts["b"]) == 2
    assert engine.proposer.requests == 1
    engine.step(reading=frozenset("b"))
    assert engine.proposer.requests == 3, "a request that waits keeps its window"
    engine.run()
    assert engine.done == RESPONSES


def test_drafts_have_room_in_the_sequence_and_the_engine(history):
    proposer = HistoryProposer(history, 5, LENGTH_MAX)
    tokens = PROMPTS["a"] + RESPONSES["a"][:3]
    for step in range(6):
        (draft,) = proposer.draft([Request("a", tokens, 13)])
        assert len(draft) == min(2 * step + 2, 5)
        tokens = tokens + draft + RESPONSES["a"][len(tokens) - 13 + len(draft) :][:1]
    proposer = HistoryProposer(history, 32, len(tokens) + 2)
    assert [len(each) for each in proposer.draft([Request("x", tokens, 13)])] == [1]
    assert proposer.draft([Request("x", [*tokens, 1], 13)]) == [[]]
    assert HistoryProposer(history, 32, 9).draft([Request("y", tokens, 13)]) == [[]]


def test_a_request_begins_anew_under_its_name_when_it_is_shorter(history):
    proposer = HistoryProposer(history, 32, LENGTH_MAX)
    proposer.draft([Request("a", PROMPTS["a"] + RESPONSES["a"][:9], 13)])
    (draft,) = proposer.draft([Request("a", PROMPTS["b"] + RESPONSES["b"][:3], 6)])
    assert draft == RESPONSES["b"][3:5]
    proposer.end(["a", "unknown"])
    assert proposer.requests == 0
    assert history.stats()["drafted_tokens"] == 0


def test_two_requests_of_one_prompt_have_windows_of_their_own(history):
    wrong = [*RESPONSES["a"][:12], *[450 + at for at in range(28)]]
    wanted = {"same": RESPONSES["a"], "other": wrong}
    prompts = dict.fromkeys(wanted, PROMPTS["a"])
    engine = VllmEngine(HistoryProposer(history, 32, LENGTH_MAX), wanted, prompts)
    engine.run()
    assert engine.done == wanted
    assert engine.steps["same"] == 7 < engine.steps["other"]


def test_refusals(history):
    with pytest.raises(dormouse.ArgumentError, match="drafted_max is 0"):
        HistoryProposer(history, 0, 10)
    proposer = HistoryProposer(history, 4, LENGTH_MAX)
    with pytest.raises(
        dormouse.ArgumentError, match="'r' has 4 prompt tokens of 3; accepted: 0 to"
    ):
        proposer.draft([Request("r", [1, 2, 3], 4)])
    with pytest.raises(dormouse.ArgumentError, match="id 2 of end is 500"):
        proposer.draft([Request("r", [1, 2, VOCAB], 2)])
    assert proposer.load_model("any", of="these") is None
    with pytest.raises(dormouse.ArgumentError, match="draft_token_num is 1"):
        HistoryCorpus(history, 1, LENGTH_MAX)
    corpus = HistoryCorpus(history, 4, LENGTH_MAX)
    with pytest.raises(dormouse.ArgumentError, match="'r' has 3 of its 9 tokens"):
        corpus.batch_get(["r"], [[1, 2, 3]], [9])


def paths(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Returns what each row of a tree reads, its own id last."""
    return [[int(token) for token, reads in zip(ids, row, strict=True) if reads] for row in mask]


def test_chains_have_the_shape_of_sglangs_trees(history):
    corpus = HistoryCorpus(history, 4, LENGTH_MAX)
    corpus.synchronize()
    sequences = [PROMPTS["a"] + RESPONSES["a"][:1], [1, 2, 3, 4]]
    ids, masks = corpus.batch_get(["a", "new"], sequences, [14, 4])
    assert ids.shape == (8,) and masks.shape == (32,) and ids.dtype == np.int64
    first, second = RESPONSES["a"][:1], RESPONSES["a"][1:3]
    assert paths(ids[:4], masks[:16].reshape(4, 4)) == [
        first,
        [*first, second[0]],
        [*first, *second],
        [*first, 0],
    ]
    assert paths(ids[4:], masks[16:].reshape(4, 4)) == [[4], [4, 0], [4, 0], [4, 0]]
    # A name that was erased may come again with another prompt.
    corpus.erase_match_state(["a", "unknown"])
    ids, _ = corpus.batch_get(["a"], [PROMPTS["b"] + RESPONSES["b"][:1]], [7])
    assert ids.tolist() == [*RESPONSES["b"][:3], 0]


def test_a_loop_as_sglangs_worker_has_it(history):
    """Verification takes the path of accepted tokens; requests that leave are erased."""
    corpus, width = HistoryCorpus(history, 8, LENGTH_MAX), 8
    output = {name: RESPONSES[name][:1] for name in RESPONSES}
    steps = dict.fromkeys(output, 1)
    running = list(output)
    while running:
        tokens = [PROMPTS[name] + output[name] for name in running]
        ids, masks = corpus.batch_get(running, tokens, [len(each) for each in tokens])
        assert len(ids) == len(running) * width
        for row, name in enumerate(running):
            own, chain = ids[row * width :][:width], masks[row * width**2 :][: width**2]
            longest = max(paths(own, chain.reshape(width, width)), key=len)
            rest = RESPONSES[name][len(output[name]) :]
            assert longest[0] == output[name][-1]
            output[name] += rest[: accepted(longest[1:], rest) + 1]
            steps[name] += 1
        corpus.batch_put(tokens)
        left = [name for name in running if len(output[name]) == len(RESPONSES[name])]
        corpus.erase_match_state(left)
        running = [name for name in running if name not in left]
    assert output == RESPONSES
    # 1 + 3 + 5 + 7 + 8 + 8 + …: a chain of 8 has 7 drafted tokens.
    assert steps == {"a": 7, "b": 6, "c": 7}
    corpus.reset()
