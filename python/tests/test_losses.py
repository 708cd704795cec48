"""What a loss function does with the model and its graph during a step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

from dormouse.hf import SharedPrefix, UnsupportedModelError

FP64_BOUND = 1e-12
THROUGH_LAYERS = "the loss function ran a backward through the layers"


def error(model, runtime, loss, **options) -> float:
    """Distance of the shared gradients from the dense ones."""
    case = group(9, (4, 1, 6))
    dense_backward(model, case, loss)
    wanted = take_gradients(model)
    SharedPrefix(model, runtime).backward(case, loss, microbatch_tokens=6, **options)
    return distance(take_gradients(model), wanted)


# Backwards inside the loss.


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj", "model.layers.3.self_attn.q_proj", "model.embed_tokens"]
)
def test_a_gradient_by_parameters_before_an_attention_is_refused(name, runtime):
    model, case = tiny(), group(9, (4, 1, 6))
    weight = model.get_submodule(name).weight

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        (grad,) = torch.autograd.grad(value, weight, create_graph=True, retain_graph=True)
        return value + grad.detach().norm()

    with pytest.raises(UnsupportedModelError, match=THROUGH_LAYERS):
        SharedPrefix(model, runtime).backward(case, loss, microbatch_tokens=6)


@pytest.mark.parametrize("kind", ["mamba2", "mamba", "qwen3_next"])
def test_a_gradient_by_parameters_of_a_recurrent_model_is_refused(kind, runtime):
    """Also by those of the last layer: the prompt's state was made by them."""
    with in_fp64():
        model, case = zoo_model(kind), group(9, (4, 1, 6))
        layers = model.backbone.layers if hasattr(model, "backbone") else model.model.layers
        weight = next(p for p in layers[-1].parameters() if p.dim() > 1)

        def loss(logits, labels, i):
            value = loss_fn(logits, labels, i)
            torch.autograd.grad(value, weight, retain_graph=True)
            return value

        with pytest.raises(UnsupportedModelError, match=THROUGH_LAYERS):
            SharedPrefix(model, runtime).backward(case, loss)
        model.zero_grad(set_to_none=True)
        SharedPrefix(model, runtime).backward(case, loss_fn)


@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.3.mlp.down_proj"])
def test_a_gradient_by_parameters_after_the_last_attention_is_exact(name, runtime):
    model = tiny(tie_word_embeddings=False)
    weight = model.get_submodule(name).weight

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        (grad,) = torch.autograd.grad(value, weight, retain_graph=True)
        return value * grad.norm()

    assert error(model, runtime, loss) <= FP64_BOUND


def test_a_gradient_by_parameters_that_need_nothing_of_the_prompt_is_exact(runtime):
    """K and V of the prompt have no gradient if only later parameters are trained."""
    model = tiny(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3.self_attn.q_proj" in name or "lm_head" in name)
    weight = model.model.layers[3].self_attn.q_proj.weight

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        (grad,) = torch.autograd.grad(value, weight, retain_graph=True)
        return value * grad.norm()

    assert error(model, runtime, loss) <= FP64_BOUND


def test_a_backward_of_the_loss_is_refused(runtime):
    model, case = tiny(), group(9, (4, 1, 6))

    def loss(logits, labels, i):
        value = loss_fn(logits, labels, i)
        value.backward(retain_graph=True)
        return value.detach()

    with pytest.raises(UnsupportedModelError, match=THROUGH_LAYERS):
        SharedPrefix(model, runtime).backward(case, loss)


def test_a_step_after_a_refused_one_is_exact(runtime):
    model, case = tiny(), group(9, (4, 1, 6))
    shared = SharedPrefix(model, runtime)

    def loss(logits, labels, i):
        loss_fn(logits, labels, i).backward()

    with pytest.raises(UnsupportedModelError, match=THROUGH_LAYERS):
        shared.backward(case, loss)
    model.zero_grad(set_to_none=True)
    shared.backward(case, loss_fn)
    got = take_gradients(model)
    dense_backward(model, case, loss_fn)
    assert distance(got, take_gradients(model)) <= FP64_BOUND


def test_a_backward_on_detached_logits_is_exact(runtime):
    def loss(logits, labels, i):
        leaf = logits.detach().requires_grad_()
        loss_fn(leaf, labels, i).backward()
        return (logits * leaf.grad).sum()

    assert error(tiny(), runtime, loss) <= FP64_BOUND


# The model inside the loss.


def test_a_dense_forward_with_gradients_is_exact(runtime):
    """A second term of the loss that runs the whole model by itself."""
    model = tiny()
    tokens = torch.arange(12)[None]

    def loss(logits, labels, i):
        return loss_fn(logits, labels, i) + model(input_ids=tokens).logits.square().mean() * (i + 1)

    assert error(model, runtime, loss) <= FP64_BOUND


def test_a_dense_backward_of_its_own_is_exact(runtime):
    model = tiny()
    tokens = torch.arange(12)[None]

    def loss(logits, labels, i):
        model(input_ids=tokens).logits.square().mean().backward()
        return loss_fn(logits, labels, i)

    assert error(model, runtime, loss) <= FP64_BOUND


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.is_on = base, True
        self.delta = torch.nn.Linear(base.in_features, base.out_features, dtype=torch.float64)

    def forward(self, x):
        return self.base(x) + self.delta(x) if self.is_on else self.base(x)

    @contextlib.contextmanager
    def disabled(self):
        """As peft does it: the adapter's parameters need no gradient meanwhile."""
        self.is_on = False
        self.delta.requires_grad_(False)
        try:
            yield
        finally:
            self.is_on = True
            self.delta.requires_grad_(True)


def test_a_reference_pass_with_adapters_off(runtime):
    model, case = tiny().requires_grad_(False), group(9, (4, 1, 6))
    attention = model.model.layers[1].self_attn
    adapter = attention.v_proj = Adapter(attention.v_proj)

    def loss(logits, labels, i):
        tokens = torch.cat([case.prompt, labels[:-1]])[None]
        with adapter.disabled(), torch.no_grad():
            reference = model(input_ids=tokens).logits[0, len(case.prompt) - 1 :].log_softmax(-1)
        own = logits.log_softmax(-1)
        return (own.exp() * (own - reference)).sum() * (i + 1)

    dense_backward(model, case, loss)
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss, microbatch_tokens=6)
    got = take_gradients(model)
    assert len(wanted) == 2 and distance(got, wanted) <= FP64_BOUND
    assert shared.backward(case, loss, microbatch_tokens=6).checked is first.checked


def test_generation_in_the_loss(runtime):
    model, case = tiny(), group(9, (4, 1, 6))
    tokens = torch.arange(5, 12)[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone, seen = model.generate(tokens, **settings), []
    shared = SharedPrefix(model, runtime)

    def loss(logits, labels, i):
        seen.append(torch.equal(model.generate(tokens, **settings), alone))
        return loss_fn(logits, labels, i)

    first = shared.backward(case, loss, microbatch_tokens=6)
    got = take_gradients(model)
    dense_backward(model, case, loss_fn)
    assert distance(got, take_gradients(model)) <= FP64_BOUND
    assert len(seen) == 3 and all(seen)
    assert shared.backward(case, loss, microbatch_tokens=6).checked is first.checked


def test_the_model_in_the_loss_of_a_prompt_that_sleeps(runtime):
    """Neither generation nor a forward with gradients reads what is asleep."""
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    model, case = tiny(**wide), group(160, (9, 4))
    tokens = case.prompt[None, :-1]

    def loss(logits, labels, i):
        model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)
        return loss_fn(logits, labels, i) + model(input_ids=tokens).logits.square().mean()

    dense_backward(model, case, loss)
    wanted = take_gradients(model)
    report = SharedPrefix(model, runtime).backward(case, loss)
    assert report.prefix["asleep_bytes_peak"] > 0
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_scores_in_the_loss(runtime):
    """As a reference pass, through another object over the same model."""
    model, case, seen = tiny(), group(9, (4, 1, 6)), []
    other = SharedPrefix(model, runtime)
    alone = other.score(case)

    def loss(logits, labels, i):
        seen.append(torch.equal(other.score(case).log_probabilities[i], alone.log_probabilities[i]))
        return loss_fn(logits, labels, i)

    SharedPrefix(model, runtime).backward(case, loss, microbatch_tokens=6)
    got = take_gradients(model)
    dense_backward(model, case, loss_fn)
    assert distance(got, take_gradients(model)) <= FP64_BOUND
    assert len(seen) == 3 and all(seen)
