"""The demo's reward, its GRPO loss and its dense loop, each against the plainest form of itself."""

from __future__ import annotations

import pytest
import torch
from models import group, loss_fn, take_gradients, tiny

from dormouse.demo import checks, dense, rewards
from dormouse.demo.grpo import CLIP, GrpoLoss

FACTS = [["golden key"], ["fifteen inches", "15 inches"], ["hedgehog"]]


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("", False, 0.0),
        ("", True, rewards.FINISHED_REWARD),
        ("A tiny Golden\nKey, it was!", False, 1 / 3),
        ("golden key golden key golden key", False, 1 / 3),
        ("the door of 15 inches", False, 1 / 3),
        ("hedgehogs", False, 1 / 3),
        ("hedgehoggery", False, 0.0),
        ("a golden monkey", False, 0.0),
        ("golden key, hedgehog, fifteen inches", True, 1.0 + rewards.FINISHED_REWARD),
    ],
)
def test_rewards(text, finished, expected):
    assert rewards.reward(text, FACTS, finished=finished) == pytest.approx(expected, abs=1e-6)


def plain_loss(logits, labels, old, advantage):
    """The definition, token by token."""
    total = 0.0
    for row, label, before in zip(logits, labels, old, strict=True):
        logprob = row[label] - torch.log(torch.exp(row).sum())
        ratio = torch.exp(logprob - before)
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        total = total - torch.minimum(ratio * advantage, clipped * advantage)
    return total / len(labels)


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_loss_and_gradient_are_the_definitions(advantage):
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (6,))
    own = torch.log_softmax(logits.detach(), -1).gather(1, labels[:, None])[:, 0]
    # Ratios on both sides of the clip, and within it.
    old = (own + torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, 0.01])).tolist()
    loss = GrpoLoss([[0.0], old], [9.0, advantage])(logits, labels, 1)
    expected = plain_loss(logits, labels, old, advantage)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-14)
    # Tokens past the clip in the advantage's direction teach nothing; the others do.
    silent = {1.5: 4, -0.7: 3}[advantage]
    rows = gradient.abs().sum(-1)
    assert rows[silent] == 0.0
    assert (rows[torch.arange(6) != silent] > 0.0).all()


def test_loss_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="1 advantages for 2 responses"):
        GrpoLoss([[0.0], [0.0]], [1.0])
    with pytest.raises(ValueError, match="response 0: 2 labels for 1 log-probabilities"):
        GrpoLoss([[0.0]], [1.0])(torch.zeros(2, 3), torch.tensor([0, 1]), 0)


def test_dense_loop_is_plain_autograd():
    model, case = tiny(), group()
    told = []
    total = dense.backward(model, case, loss_fn, told.append)
    gradients = take_gradients(model)
    assert told == list(range(len(case.responses)))
    expected = 0.0
    for i, (response, weight) in enumerate(zip(case.responses, case.weights, strict=True)):
        tokens = torch.cat([case.prompt, response])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        rows = logits[len(case.prompt) - 1 : -1]
        expected = expected + weight * loss_fn(rows, response, i)
    expected.backward()
    wanted = take_gradients(model)
    assert total == pytest.approx(expected.item(), rel=1e-12)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-9, atol=1e-12), name


def test_exact_norms_make_an_fp64_forward_fp64():
    # With norms through FP32, the same weights in another order of magnitude of precision show.
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    norm = model.model.norm
    rows = torch.randn(5, 32, dtype=torch.float64)
    exact = rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    before = (norm(rows) - exact).abs().max()
    with checks.exact_norms(model):
        within = (norm(rows) - exact).abs().max()
    assert within < 1e-14 < 1e-9 < before
    assert (norm(rows) - exact).abs().max() == before
