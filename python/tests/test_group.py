"""Bad groups are refused with the value seen and what is accepted."""

from __future__ import annotations

import pytest
import torch
from models import group, loss_fn, tiny

from dormouse import ArgumentError, Group
from dormouse.hf import SharedPrefix


@pytest.mark.parametrize(
    ("prompt", "responses", "weights", "message"),
    [
        ([1], [[2]], None, "prompt has 1 tokens; accepted: at least 2"),
        ([], [[2]], None, "prompt has 0 tokens"),
        ([1, 2], [], None, "0 responses; accepted: at least 1"),
        ([1, 2], [[3], []], None, "response 1 has 0 tokens"),
        ([1, 2], [[3]], [float("nan")], "weight 0 is nan; accepted: finite"),
        ([1, 2], [[3]], [float("inf")], "weight 0 is inf"),
        ([1, 2], [[3]], [1.0, 2.0], "2 weights for 1 responses"),
        ([1, -2], [[3]], None, "prompt has token id -2; accepted: 0 and above"),
        ([1, 2], [[3, -7]], None, "response 0 has token id -7"),
        ([1.5, 2.5], [[3]], None, "dtype torch.float32; accepted: integers"),
        ([[1, 2]], [[3]], None, r"shape \[1, 2\]; accepted: 1-D"),
    ],
)
def test_bad_groups(prompt, responses, weights, message):
    with pytest.raises(ArgumentError, match=message):
        Group(prompt, responses, weights)


def test_lists_and_tensors_mean_the_same():
    a = Group([1, 2, 3], [[4], [5, 6]])
    b = Group(torch.tensor([1, 2, 3]), [torch.tensor([4]), torch.tensor([5, 6], dtype=torch.int32)])
    assert torch.equal(a.prompt, b.prompt)
    assert all(torch.equal(x, y) for x, y in zip(a.responses, b.responses, strict=True))
    assert a.weights == b.weights == [0.5, 0.5]


def test_a_token_outside_the_vocabulary_is_refused_before_anything_runs(runtime):
    model = tiny()
    case = group()
    case.responses[2][0] = 97
    with pytest.raises(ArgumentError, match="97"):
        SharedPrefix(model, runtime).backward(case, loss_fn)
    assert all(p.grad is None for p in model.parameters())


def test_zero_microbatch_tokens(runtime):
    with pytest.raises(ArgumentError, match="0"):
        SharedPrefix(tiny(), runtime).backward(group(), loss_fn, microbatch_tokens=0)


def test_tokens_of_every_other_place_are_those_read():
    ids = torch.arange(40).reshape(2, 20)
    group = Group(ids[:, 3], [ids[0, ::2]])
    assert all(tokens.is_contiguous() for tokens in (group.prompt, *group.responses))
    assert (group.prompt.tolist(), group.responses[0].tolist()) == ([3, 23], [*range(0, 20, 2)])
