"""What drafts, the loop that decodes recorded responses again, and the rows."""

from __future__ import annotations

from functools import partial

import draft_rows
import pytest
import torch
from decoding import Counts, Model, decode, earlier_of
from draft_rows import rows_of
from drafting import LOOKUP, NGRAM, NGRAM_DRAFT_TOKENS, OURS, PLAIN, Recorded, contenders
from transformers import LlamaConfig, LlamaForCausalLM

from dormouse.demo import epochs
from dormouse.demo.epochs import Answer, Epoch, Recording

VOCAB, STOP = 100, 0
PROMPT = [41, 42, 43, 44, 45, 46, 47, 48, 41, 42]
RESPONSE = [10 + at * at % 31 for at in range(24)] + [STOP]


def counts_of(name: str, earlier: list[list[int]], response: list[int], forward=None) -> Counts:
    recorded = [Recorded(PROMPT, each, 1.0, 0) for each in earlier]
    counts = Counts()
    decode(contenders(VOCAB, recorded)[name], PROMPT, response, 32, STOP, counts, forward)
    return counts


def test_nothing_drafts_a_token_a_forward():
    counts = counts_of(PLAIN, [RESPONSE], RESPONSE)
    assert (counts.tokens, counts.forwards, counts.drafted) == (25, 25, 0)
    assert counts.acceptance == 0.0


def test_ours_drafts_the_response_of_before():
    counts = counts_of(OURS, [RESPONSE], RESPONSE)
    # 3 + 5 + 7 + 9 tokens, and the end.
    assert (counts.tokens, counts.forwards) == (25, 5)
    assert counts.drafted == counts.accepted == 20
    assert counts.tokens_per_forward == 5.0


def test_a_table_drafts_what_followed_most_often():
    other = [*RESPONSE[:6], *[90] * 18, STOP]
    counts = counts_of(NGRAM, [RESPONSE, RESPONSE, other], RESPONSE)
    assert counts.accepted == counts.drafted > 15
    assert counts.forwards == 3, f"drafts of {NGRAM_DRAFT_TOKENS}"
    none = counts_of(NGRAM, [], [60, 61, 62, 63])
    assert none.drafted == 0 and none.forwards == 4


def test_prompt_lookup_copies_the_prompt():
    counts = counts_of(LOOKUP, [], [43, 44, 45, 46, 99])
    assert counts.accepted == 4 and counts.forwards == 1


def test_what_is_not_recorded_is_rejected_where_it_differs():
    fed = []
    response = [*RESPONSE[:1], 77, *RESPONSE[2:]]
    counts = counts_of(
        OURS, [RESPONSE], response, lambda ids, rejected: fed.append((ids, rejected))
    )
    assert counts.forwards == len(fed)
    kept = torch.cat([ids[:, : ids.shape[1] - rejected] for ids, rejected in fed], dim=1)
    # Each token once: the prompt's last, and all but the response's last.
    assert kept[0].tolist() == [PROMPT[-1], *response[:-1]]
    assert sum(rejected for _, rejected in fed) == counts.drafted - counts.accepted > 0


def test_the_model_runs_each_token_at_its_place():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.3, **sizes)
    model = LlamaForCausalLM(config).double().eval()
    ours = Model(model)
    for response in ([*RESPONSE[:3], 77, *RESPONSE[4:]], RESPONSE, RESPONSE[:4]):
        rows, kept = [], []
        forward = ours.begin(PROMPT)
        hook = model.register_forward_hook(lambda _, __, out, to=rows: to.append(out.logits[0]))

        def run(ids, rejected, forward=forward, to=kept):
            forward(ids, rejected)
            to.append(ids.shape[1] - rejected)

        counts_of(OURS, [RESPONSE], response, run)
        hook.remove()
        found = torch.cat([each[:count] for each, count in zip(rows, kept, strict=True)])
        with torch.no_grad():
            wanted = model(torch.tensor([[*PROMPT, *response[:-1]]])).logits[0, len(PROMPT) - 1 :]
        assert torch.allclose(found, wanted, atol=1e-10)


def recording() -> Recording:
    def epoch(number: int, first: int) -> Epoch:
        return Epoch(number, {"p": [Answer([first], 1.0, 0.5), Answer([first + 1], 0.0, 0.25)]})

    return Recording({}, {"p": PROMPT}, [epoch(0, 1), epoch(1, 3), epoch(2, 5)])


def test_only_earlier_epochs_and_the_own_temperature_are_known():
    assert earlier_of(recording(), 0, 1.0) == []
    assert earlier_of(recording(), 2, 0.0) == [
        Recorded(PROMPT, [2], 0.25, 0),
        Recorded(PROMPT, [4], 0.25, 1),
    ]


def test_rows_have_figures_of_all_and_a_bar_over_prompt_lookup():
    found = {
        OURS: Counts(tokens=100, forwards=40, drafted=80, accepted=60),
        LOOKUP: Counts(tokens=100, forwards=80, drafted=100, accepted=20),
        NGRAM: Counts(tokens=100, forwards=50, drafted=100, accepted=50),
    }
    rows = {row.name: row for row in rows_of("_greedy", found, "how")}
    assert rows["acceptance_greedy"].ours == 0.75
    assert rows["acceptance_greedy"].peers == {LOOKUP: 0.2, NGRAM: 0.5}
    assert rows["tokens_per_forward_greedy"].ours == 2.5
    over = rows["acceptance_over_prompt_lookup_greedy"]
    assert over.ours == pytest.approx(3.75) and over.met is True
    found[LOOKUP] = Counts(tokens=100, forwards=100, drafted=9)
    row = rows_of("_greedy", found, "how")[-1]
    assert row.ours is None and "no accepted token" in row.how
    total = Counts()
    total.add(found[OURS])
    total.add(found[NGRAM])
    assert (total.tokens, total.forwards, total.acceptance) == (200, 90, 110 / 180)


def test_makers_name_the_rows_that_they_make(monkeypatch):
    figures = {"tokens": 10, "acceptance": 0.9}
    figures |= dict.fromkeys(draft_rows.SPEED_BARS, 4.0)
    monkeypatch.setattr(draft_rows, "example", lambda *_: figures)
    made = dict(draft_rows.MAKERS)
    for label, met in (("", [True, True, False]), ("_over_budget", [True, False])):
        rows = draft_rows.speed_rows(label)
        names = tuple(row.name for row in rows)
        assert names in made and names[0] == f"draft_us_per_token{label}"
        assert [row.met for row in rows] == met
    found = dict.fromkeys((OURS, LOOKUP, NGRAM), Counts(tokens=1, forwards=1))
    for label in ("", "_greedy", "_same_weights"):
        assert tuple(row.name for row in rows_of(label, found, "")) in made


def test_the_recorded_groups_are_two_epochs_of_one_policy():
    found = draft_rows.halves()
    assert [each.number for each in found.epochs] == [0, 1]
    for name, prompt in found.prompts.items():
        first, second = (epoch.answers[name] for epoch in found.epochs)
        assert len(first) == len(second) == draft_rows.HALF and len(prompt) > 400
        assert [a.tokens for a in first] != [a.tokens for a in second]
    assert len(earlier_of(found, 1, 1.0)) == draft_rows.HALF * len(found.prompts)


def test_without_a_recording_rows_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(epochs, "read", partial(epochs.read, tmp_path))
    made = dict(draft_rows.MAKERS)
    for names in (draft_rows.names("_greedy"), draft_rows.SPEEDUPS):
        rows = made[names]()
        assert tuple(row.name for row in rows) == names
        assert all(row.ours is None and "is missing" in row.how for row in rows)
