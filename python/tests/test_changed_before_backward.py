"""What trainers change between a differentiable call and its backward. The mode "twice" runs the
forward again in the backward: gradients are those of the model as it was called, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import distance, take_gradients, tiny
from test_adapters import adapted, lora
from test_token_scores import GRAPHS, a_batch, dense

from dormouse.hf import SharedPrefix, UnsupportedModelError, token_scores

pytestmark = pytest.mark.filterwarnings("ignore")

CHANGED = "between the call and its backward"


def two_adapters(**options):
    model = adapted(lora(**options))
    model.add_adapter("other", lora())
    model.set_adapter("default")
    return model.double()


def frozen_weight(model) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.mul_(1.5)


def frozen_head(model) -> None:
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(1.5)


def buffer(model) -> None:
    model.get_base_model().model.rotary_emb.inv_freq.mul_(1.5)


def unmerged_adapter(model) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def forward_hook(model) -> None:
    model.get_base_model().lm_head.register_forward_hook(lambda module, args, out: 2 * out)


CHANGES: dict[str, Callable] = {
    "another mode": lambda model: model.eval(),
    "no adapter": lambda model: model.base_model.disable_adapter_layers(),
    "another adapter": lambda model: model.set_adapter("other"),
    "merged adapter": lambda model: model.merge_adapter(),
    "frozen": lambda model: model.requires_grad_(False),
    **{each.__name__: each for each in (frozen_weight, frozen_head, buffer, forward_hook)},
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_before_the_backward_are_refused(what, runtime):
    model = two_adapters(**({"lora_dropout": 0.2} if what == "another mode" else {}))
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime, prompt_dropout=what != "another mode")
    scores = shared.score(ids, mask, keep=keep, graphs="twice")
    CHANGES[what](model)
    with pytest.raises(UnsupportedModelError, match=CHANGED):
        scores.log_probabilities.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def another_forward(model) -> None:
    with torch.no_grad():
        model(input_ids=torch.arange(9)[None])


def generation(model) -> None:
    model.eval()
    model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()


def reference(model) -> None:
    with model.disable_adapter():
        another_forward(model)
    model.set_adapter("other")
    model.set_adapter("default")


def same_buffer(model) -> None:
    """As DistributedDataParallel does before each of its forwards."""
    for each in model.buffers():
        each.copy_(each.clone())


HARMLESS = (another_forward, generation, reference, same_buffer, unmerged_adapter)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("change", HARMLESS, ids=lambda each: each.__name__)
def test_what_is_as_it_was_is_no_change(change, graphs, runtime):
    model = two_adapters()
    ids, mask, keep = a_batch()
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    change(model)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_frozen_weight_that_changes_is_refused_in_both_modes(graphs, runtime):
    model = two_adapters()
    ids, mask, keep = a_batch()
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    frozen_head(model)
    with pytest.raises(UnsupportedModelError, match=f"weights were changed {CHANGED}"):
        scores.log_probabilities.sum().backward()


def test_what_every_forward_writes_is_no_change(runtime):
    """A buffer that counts, and a weight that an adapter registers again."""
    model = adapted(lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]))
    norm = model.get_base_model().model.norm
    norm.register_buffer("runs", torch.zeros(()))
    norm.register_forward_hook(lambda module, args, out: module.runs.add_(1) and None)
    ids, mask, keep = a_batch()
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs="twice")
    assert norm.runs > 0
    another_forward(model)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


def test_a_large_buffer_must_not_be_written(runtime, monkeypatch):
    monkeypatch.setattr(token_scores, "BUFFER_BYTES_MAX", 0)
    model = tiny()
    ids, mask, keep = a_batch()
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs="twice")
    for each in model.buffers():
        each.copy_(each.clone())
    with pytest.raises(UnsupportedModelError, match=f"a buffer of shape .* {CHANGED}"):
        scores.log_probabilities.sum().backward()


def test_a_state_that_is_checked_meanwhile_is_no_change(runtime):
    """Another request is checked between the call and its backward."""
    model = tiny().train()
    ids, mask, keep = a_batch()
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs="twice")
    with torch.no_grad():
        shared.score(ids, mask, keep=keep, outputs=["last_hidden_state"])
    model.eval()
    with torch.no_grad():
        shared.score(ids, mask, keep=keep)
    model.train()
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10

