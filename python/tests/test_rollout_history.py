"""Rollout histories through Python, and verification of drafts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

import dormouse
from dormouse.history import (
    History,
    Rollout,
    draft_all,
    feedback_all,
    verify_greedy,
    verify_sampled,
)

VOCAB = 1000
PROMPT = list(range(100, 112))
RESPONSE = [500 + at * at % 400 for at in range(60)]


def decode(history, prompt, response, tokens_max=32):
    """Returns the number of forwards that an exact copy of ``response`` takes, and the windows."""
    drafter, sequence = history.drafter(prompt), list(prompt)
    forwards, windows = 0, []
    while len(sequence) < len(prompt) + len(response):
        draft = drafter.draft(sequence, tokens_max)
        windows.append(drafter.window_tokens)
        rest = response[len(sequence) - len(prompt) :]
        equal = 0
        while equal < min(len(draft), len(rest)) and draft[equal] == rest[equal]:
            equal += 1
        drafter.feedback(equal)
        sequence += rest[: equal + 1]
        forwards += 1
    return forwards, windows


def test_a_repeated_response_takes_few_forwards():
    with History(VOCAB) as history:
        assert decode(history, PROMPT, RESPONSE)[0] == len(RESPONSE)
        history.record(PROMPT, RESPONSE, 1.0, 0)
        forwards, windows = decode(history, torch.tensor(PROMPT), RESPONSE)
        assert windows == [2, 4, 6, 8, 10, 12, 14] and forwards == 7
        stats = history.stats()
        assert stats["prompts"] == 1 and stats["tokens"] == len(RESPONSE)
        assert stats["drafted_tokens"] == stats["accepted_tokens"] == 54


def test_ids_of_any_kind_are_one():
    kinds = [
        PROMPT,
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        torch.tensor([[t, 0] for t in PROMPT])[:, 0],
        torch.tensor(PROMPT).numpy(),
    ]
    with History(VOCAB, weighing="count") as history:
        history.record_all(Rollout(each, RESPONSE) for each in kinds)
        assert history.stats()["prompts"] == 1
        drafters = [history.drafter(each) for each in kinds]
        drafts = draft_all(drafters, kinds)
        assert drafts == [RESPONSE[:2]] * len(kinds)
        assert all(each.matched_tokens == 7 for each in drafters)
        assert draft_all([], []) == []
        with pytest.raises(dormouse.ArgumentError, match="accepted is 3; accepted: at most 2"):
            feedback_all(drafters, [2, 2, 3, 2, 2])
        assert all(each.window_tokens == 2 for each in drafters)
        feedback_all(drafters, [2, 2, 1, 2, 2])
        assert [each.window_tokens for each in drafters] == [4, 4, 2, 4, 4]
        assert history.stats()["accepted_tokens"] == 9
        with pytest.raises(dormouse.ArgumentError, match="rollout 1: id 0 of response is 1000"):
            history.record_all([Rollout(PROMPT, [1]), Rollout(PROMPT, [VOCAB])])


def test_what_is_refused():
    with pytest.raises(dormouse.ArgumentError, match="vocab is 0"):
        History(0)
    with pytest.raises(dormouse.ArgumentError, match="weighing is 'rank'; accepted: reward, count"):
        History(VOCAB, weighing="rank")
    with pytest.raises(dormouse.ArgumentError, match="epochs_kept is 0"):
        History(VOCAB, epochs_kept=0)
    with pytest.raises(dormouse.ArgumentError, match="vocab is -1"):
        History(-1)
    with History(VOCAB) as history, History(VOCAB) as other:
        with pytest.raises(dormouse.ArgumentError, match="id 0 of response is 1000"):
            history.record(PROMPT, [VOCAB])
        with pytest.raises(dormouse.ArgumentError, match="id 1 of prompt is -1"):
            history.record([3, -1], [1])
        with pytest.raises(dormouse.ArgumentError, match="reward is NaN"):
            history.record(PROMPT, [1], float("nan"))
        with pytest.raises(dormouse.ArgumentError, match="epoch is -1"):
            history.record(PROMPT, [1], epoch=-1)
        history.record(PROMPT, [1], epoch=5)
        with pytest.raises(dormouse.ArgumentError, match="epoch is 3 of a prompt with responses"):
            history.record(PROMPT, [1], epoch=3)
        with pytest.raises(dormouse.ArgumentError, match="id 1 of end is 1000"):
            history.drafter(PROMPT).draft([1, VOCAB, 2])
        with pytest.raises(dormouse.ArgumentError, match="accepted is 1; accepted: at most 0"):
            history.drafter(PROMPT).feedback(1)
        with pytest.raises(dormouse.ArgumentError, match="accepted is -1; accepted: 0 or more"):
            history.drafter(PROMPT).feedback(-1)
        with pytest.raises(dormouse.ArgumentError, match="several histories"):
            draft_all([history.drafter([]), other.drafter([])], [[], []])
        with pytest.raises(dormouse.StateError, match="no directory"):
            history.save()
        assert history.drafter([1]).draft(PROMPT) == []


def test_an_empty_prompt_has_a_history():
    with History(VOCAB) as history:
        history.record([], [])
        history.record([], [5, 6, 7, 8, 9])
        assert history.drafter([]).draft([5, 6, 7]) == [8, 9]
        assert history.drafter([]).draft([]) == []


def test_a_history_is_saved_loaded_and_locked(tmp_path):
    with History(VOCAB, dir=tmp_path, budget_bytes=0, cold_bytes=1 << 20) as history:
        history.record(PROMPT, RESPONSE)
        assert history.stats()["cold_prompts"] == 1 and history.failure() == ""
        history.save()
        with pytest.raises(dormouse.StateError, match="is in use by process .*; accepted: a dir"):
            History(VOCAB, dir=tmp_path)
    with History(VOCAB, dir=tmp_path) as history:
        assert history.drafter(PROMPT).draft(PROMPT) == RESPONSE[:2]
    saved = tmp_path / "history.dormouse"
    damaged = bytearray(saved.read_bytes())
    damaged[50] ^= 4
    saved.write_bytes(damaged)
    with pytest.raises(dormouse.StorageError, match="its checksum is"):
        History(VOCAB, dir=tmp_path)
    assert saved.read_bytes() == damaged


# Argument: the directory. Prints when it is locked, and is killed then.
OWNER = """
import os, sys, time
from dormouse.history import Dialogue, History
history = {kind}
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["History(9, dir=sys.argv[1])", "Dialogue(4, dir=sys.argv[1])"])
def test_a_forked_child_does_not_keep_the_directory(tmp_path, kind):
    command = [sys.executable, "-c", OWNER.format(kind=kind), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(dormouse.StateError, match=f"in use by process {owner.pid} on"):
            History(9, dir=tmp_path)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        # Its child lives.
        os.killpg(owner.pid, 0)
        with History(9, dir=tmp_path):
            pass
    finally:
        os.killpg(owner.pid, signal.SIGKILL)


def test_a_saved_history_that_is_not_there_is_told_from_an_empty_directory(tmp_path):
    (tmp_path / "history.dormouse").symlink_to(tmp_path / "unmounted")
    with pytest.raises(dormouse.StorageError, match="reading: No such file"):
        History(9, dir=tmp_path)


def test_greedy_verification_is_greedy_decoding():
    """A table of logits by the token before is the model."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(50, 50, generator=generator)
    for trial in range(200):
        start = trial % 50
        own = [start]
        for _ in range(6):
            own.append(int(table[own[-1]].argmax()))
        draft = own[1 : 1 + trial % 6]
        if trial % 3 and draft:
            draft[trial % len(draft)] = (draft[trial % len(draft)] + 1) % 50
        emitted = verify_greedy(table[[start, *draft]], draft)
        assert emitted == own[1 : 1 + len(emitted)] and 1 <= len(emitted) <= len(draft) + 1
        equal = next((i for i, (a, b) in enumerate(zip(draft, own[1:])) if a != b), len(draft))
        assert len(emitted) == equal + 1


def test_tokens_are_those_of_the_same_random_numbers():
    """Greedy verification of a sampler's own draws: with noise of Gumbel's law for each place, the
    greatest sum with the logits is a sample, and with any draft the same one."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(20, 20, generator=generator)
    for trial in range(100):
        noise = -torch.log(-torch.log(torch.rand(8, 20, generator=generator)))
        own = [trial % 20]
        for place in noise[:-1]:
            own.append(int((table[own[-1]] + place).argmax()))
        draft = own[1 : 2 + trial % 6]
        if trial % 3:
            draft[-1] = (draft[-1] + trial % 2) % 20
        rows = table[[own[0], *draft]] + noise[: len(draft) + 1]
        emitted = verify_greedy(rows, draft)
        assert emitted == own[1 : 1 + len(emitted)]
        assert len(emitted) >= len(draft)


# By degrees of freedom; of a chi-square, one in a million is above.
CHI_SQUARE_MAX = {5: 35.9, 35: 90.0}


@pytest.mark.parametrize("draft", [[2, 2, 1], [0, 5, 5], [3], []])
def test_sampled_verification_keeps_the_distribution(draft):
    """100,000 samples of three tokens from a chain with memory: each token after each history."""
    torch.manual_seed(0)
    chain = torch.softmax(torch.randn(6, 6, dtype=torch.float64) * 1.5, -1)
    chain[4, 1] = 0
    chain[4] /= chain[4].sum()
    generator = torch.Generator().manual_seed(1)
    start, samples = 0, 100_000
    rows = chain[[start, *draft]]
    verified = [verify_sampled(rows, draft, generator)[:3] for _ in range(samples)]
    sequences = torch.tensor([(each + [0, 0])[:3] for each in verified])
    for place in (1, 2):
        # What verification did not emit follows by plain sampling.
        is_short = torch.tensor([len(each) <= place for each in verified])
        last = sequences[is_short, place - 1]
        sequences[is_short, place] = torch.multinomial(chain[last], 1, generator=generator)[:, 0]
    counts = torch.zeros(6, 6, 6, dtype=torch.float64)
    counts.index_put_(tuple(sequences.T), counts.new_ones(()), accumulate=True)
    wanted = chain[start, :, None, None] * chain[:, :, None] * chain[None, :, :]
    for dims in ((1, 2), (0, 2), (0, 1)):
        seen, expected = counts.sum(dims), wanted.sum(dims) * samples
        assert float(((seen - expected) ** 2 / expected).sum()) < CHI_SQUARE_MAX[5]
    # Pairs too, where enough are expected: what follows depends on what was accepted.
    seen, expected = counts.sum(2), wanted.sum(2) * samples
    enough = expected > 20
    off = ((seen - expected) ** 2 / expected.clamp(min=1e-9))[enough].sum()
    assert float(off) < CHI_SQUARE_MAX[35]
    assert (seen[expected == 0] == 0).all()


def test_verification_refuses_other_shapes():
    with pytest.raises(dormouse.ArgumentError, match=r"\[2, 5\] for a draft of 2 tokens"):
        verify_greedy(torch.zeros(2, 5), [1, 2])
    with pytest.raises(dormouse.ArgumentError, match="token 0 of the draft is 5; accepted: 0 to 4"):
        verify_sampled(torch.zeros(2, 5), [5])
