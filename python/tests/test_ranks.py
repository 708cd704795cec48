"""What ranks settle, without any rank: the rule is pure, and the same for each."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import torch
from models import group, loss_fn, take_gradients, tiny

from dormouse import DormouseError, ranks
from dormouse.hf import SharedPrefix
from dormouse.hf.outputs import Losses
from dormouse.ranks import GroupSlot, RanksDifferError, Share, settle
from dormouse.schedule import query


def row(microbatches=(1,), tokens=8, **changes) -> dict:
    """One rank's message."""
    share = Share({"model": "a"}, {"microbatch_tokens": tokens}, tuple(microbatches))
    return json.loads(json.dumps(vars(share) | changes))


def test_shares_are_padded_to_the_largest():
    table = [row([1, 4, 2]), row([3]), row([])]
    first, second, third = (settle(table, rank) for rank in range(3))
    assert first.slots == (GroupSlot(1, 4), GroupSlot(2, 2), GroupSlot(0, 1))
    assert second.slots == (GroupSlot(0, 4), GroupSlot(None, 2), GroupSlot(None, 1))
    assert third.slots == (GroupSlot(None, 4), GroupSlot(None, 2), GroupSlot(None, 1))
    assert first.sequence() == [
        *[
            "prefix forward",
            "microbatch",
            "microbatch",
            "microbatch",
            "microbatch",
            "prefix backward",
        ],
        *["prefix forward", "microbatch", "microbatch", "prefix backward"],
        *["prefix forward", "microbatch", "prefix backward"],
    ]


def test_any_shares_give_every_rank_the_same_passes_and_all_its_groups():
    rng = random.Random(1)
    for _ in range(300):
        table = [
            row([rng.randint(1, 9) for _ in range(rng.randint(0, 5))], probes=rng.randint(0, 2))
            for _ in range(rng.randint(1, 5))
        ]
        settled = [settle(table, rank) for rank in range(len(table))]
        assert len({tuple(each.sequence()) for each in settled}) == 1
        for own, each in zip(table, settled, strict=True):
            ours = {slot.group: slot.microbatches for slot in each.slots if slot.group is not None}
            assert sorted(ours) == list(range(len(own["microbatches"])))
            assert all(
                ours[index] >= microbatches
                for index, microbatches in enumerate(own["microbatches"])
            )


def test_the_most_microbatches_first_needs_the_fewest_dummies():
    table = [row([1, 5]), row([5, 1])]
    assert sum(slot.microbatches for slot in settle(table, 0).slots) == 6


def test_passes_without_collectives_are_not_padded():
    table = [
        row([2, 1], passes_hold_collectives=False, probes=1),
        row([], passes_hold_collectives=False),
    ]
    first, second = settle(table, 0), settle(table, 1)
    assert first.slots == (GroupSlot(0, 2), GroupSlot(1, 1))
    assert second.slots == ()
    assert (first.probes, second.probes) == (1, 0)
    assert first.sequence() == second.sequence() == ["average"]


def test_probes_are_padded_as_well():
    assert settle([row(probes=0), row(probes=2)], 0).sequence()[:2] == ["probe", "probe"]


def test_the_smallest_budget_counts_and_who_planned_with_more_plans_again():
    differing = settle([row(tokens=8), row(tokens=5)], 0)
    assert differing.budgets == {"microbatch_tokens": 5}
    assert not differing.settled
    assert settle([row(tokens=5), row(tokens=5)], 0).settled


def test_differences_are_named_with_their_ranks():
    table = [row(), row(must_match={"model": "b"}), row(must_match={"model": "b", "x": "1"})]
    with pytest.raises(RanksDifferError) as caught:
        settle(table, 0)
    assert caught.value.differences == {
        "model": ["a", "b", "b"],
        "x": ["nothing", "nothing", "1"],
    }
    assert "ranks differ in model: rank 0 has 'a', ranks 1 2 have 'b'" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"passes_hold_collectives": False}, "passes hold collectives"),
        ({"budgets": {"host_bytes": 1}}, "names of budgets"),
        ({"failure": "ValueError: no"}, "readiness"),
    ],
)
def test_what_else_must_be_equal(other, name):
    with pytest.raises(RanksDifferError) as caught:
        settle([row(), row(**other)], 1)
    assert list(caught.value.differences) == [name]


def test_a_failure_alone_is_enough_to_be_told():
    """A rank that failed says nothing else."""
    with pytest.raises(RanksDifferError, match="rank 1 has 'ValueError: no'"):
        settle([row(), {"failure": "ValueError: no"}], 0)


def test_a_process_alone_agrees_with_itself():
    share = Share({"model": "a"}, {"microbatch_tokens": 8}, (2, 3))
    agreement = ranks.agree(None, share)
    assert (agreement.ranks, agreement.settled) == (1, True)
    assert agreement.slots == (GroupSlot(1, 3), GroupSlot(0, 2))
    ranks.confirm(None, agreement.sequence())


def test_a_message_has_room_for_a_thousand_groups_and_no_more_than_it_says():
    share = Share({"model": "a" * 500}, {"microbatch_tokens": 8}, (99999,) * 1000)
    assert len(ranks.agree(None, share).slots) == 1000
    share = Share({}, {}, (99999,) * 2000)
    with pytest.raises(DormouseError, match="2000 groups take .*; accepted: 8188 bytes"):
        ranks.agree(None, share)


def changed(value):
    """The value with each of its leaves changed in turn, and the leaf's path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            for path, other in changed(inner):
                copy = value.copy()
                copy[key] = other
                yield f"/{key}{path}", copy
    elif isinstance(value, bool):
        yield "", not value
    elif isinstance(value, str):
        yield "", value + "x"
    else:
        yield "", (value or 0) + (0.5 if isinstance(value, float) else 1)


OPTIONS = {
    "ranks": 2,
    "method": "contiguous",
    "unit": "leaf",
    "exchange": True,
    "ops_hold_collectives": True,
    "microbatch_tokens": 8,
    "rates": {"nodes": 1e-5, "microbatches": 1e-5, "rows": 1e-6},
    "model": {
        "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "dtype_bytes": 4,
        "layer_linear_weights": 100, "kv_linear_weights": 20, "last_layer_prefix_weights": 25,
        "head_weights": 50, "saved_bytes_per_token_layer": 16,
    },
    "machine": {"link_bytes_per_s": 50 * 10**9, "flops_per_s": 0, "op_overhead_ns": 0},
}  # fmt: skip
FOREST = {"parents": [None, 0, 0], "lengths": [900, 500, 500]}


@pytest.mark.parametrize(("part", "fields"), [("inputs", 6), ("options", 22), ("collectives", 40)])
def test_every_field_of_a_plan_counts_and_only_its_part_is_named(part, fields):
    shares = query("shares", forest=FOREST, options=OPTIONS)
    assert shares["exchanges"] and shares["collective_order"]["kinds"], (
        "every kind of field is there"
    )
    plan = {"inputs": FOREST, "options": OPTIONS, "collectives": shares}

    def message(parts):
        return row(must_match={name: ranks.digest(value) for name, value in parts.items()})

    own, tried = message(plan), 0
    assert settle([own, own], 1).settled
    for path, other in changed(plan[part]):
        with pytest.raises(RanksDifferError, match="ranks 0 2 have .*rank 1 has") as caught:
            settle([own, message({**plan, part: other}), own], 0)
        assert list(caught.value.differences) == [part], path
        tried += 1
    assert tried >= fields


def test_the_digest_is_of_canonical_json():
    """``sha256sum`` of the same text; -0.0 and 0.0 differ, the order of keys does not."""
    wanted = "fc2ad738648c4fb64405d947fb6208be11f0d20eafd63cf08cdbaa3e0d2d23e8"
    assert ranks.digest({"b": [1, 0.5], "a": None}) == wanted
    assert ranks.digest({"a": None, "b": [1, 0.5]}) == wanted
    assert ranks.digest(0.0) != ranks.digest(-0.0)


@pytest.fixture
def sent(monkeypatch):
    """Messages of this rank, as though there were another."""
    messages = []

    def exchange(process_group, message, nbytes, device):
        assert len(message) <= nbytes - 4, "a longer one would have the others wait for its bytes"
        messages.append(json.loads(message))
        return [messages[-1]]

    monkeypatch.setattr(ranks, "_exchange", exchange)
    return messages


@pytest.mark.parametrize(
    ("share", "failure"),
    [
        (Share({"model": object()}, {}, ()), "TypeError: Object of type object is not JSON"),
        (Share({}, {"microbatch_tokens": {1}}, ()), "TypeError: Object of type set is not JSON"),
        (Share({}, {}, (99999,) * 2000), "DormouseError: 2000 groups take"),
        (Share({}, {}, None), "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_share_that_cannot_be_said_is_a_failure_that_others_are_told(share, failure, sent):
    with pytest.raises((TypeError, DormouseError)):
        ranks.agree(None, share)
    assert [list(message) for message in sent] == [["failure"]]
    assert sent[0]["failure"].startswith(failure)


@pytest.mark.parametrize("text", ["x" * 5000, "\U0001f4a4" * 5000, '"' * 5000, "\0" * 5000])
def test_any_failure_has_room_in_a_message(text, sent):
    ranks.refuse(None, ValueError(text))
    told = sent[0]["failure"]
    assert told.startswith("ValueError: ") and len(told) == ranks.FAILURE_CHARS_MAX


def test_buckets_hold_one_type_and_no_more_than_their_size(monkeypatch):
    monkeypatch.setattr(ranks, "BUCKET_BYTES", 64)
    sizes = [4, 8, 4, 40, 1]
    tensors = [torch.zeros(size) for size in sizes] + [torch.zeros(1, dtype=torch.float64)]
    assert [[len(t) for t in bucket] for bucket in ranks._buckets(tensors)] == [
        *([4, 8, 4], [40], [1], [1])
    ]


def test_a_step_alone_is_backward_of_each_group(runtime):
    model, cases = tiny(num_hidden_layers=2), [group(9, (4, 2)), group(12, (3, 5, 1), seed=2)]
    shared = SharedPrefix(model, runtime)
    losses = [shared.backward(case, loss_fn, microbatch_tokens=4).loss for case in cases]
    wanted = take_gradients(model)
    report = shared.step(
        cases, lambda logits, labels, i, g: loss_fn(logits, labels, i), microbatch_tokens=4
    )
    got = take_gradients(model)
    assert [each.loss for each in report.groups] == losses
    assert report.loss == pytest.approx(sum(losses))
    # The group with the most microbatches goes first, so sums are in another order.
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-13)


def test_a_dummy_group_gives_gradients_of_exactly_zero_and_no_statistics(runtime):
    model = tiny(num_hidden_layers=2)
    shared = SharedPrefix(model, runtime)
    with contextlib.ExitStack() as stack:
        offer = shared._offer(stack, [], Losses(loss_fn), None, False, 8)
        report = shared._run_dummy(offer, 3, is_last=True)
    gradients = take_gradients(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for gradient in gradients.values())
    assert report.loss == 0.0
    assert report.counts == {
        "prefix_tokens": 1,
        "recomputed_tokens": 0,
        "microbatch_tokens": 0,
        "microbatches": 0,
        "dummy_microbatches": 3,
    }
