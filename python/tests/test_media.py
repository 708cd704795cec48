"""Prompts with the tokens of images, video and sound, whose features a group does not have."""

from __future__ import annotations

import pytest
import torch
from models import VOCAB, tiny

import dormouse
from dormouse.hf import SharedPrefix, UnsupportedModelError
from dormouse.hf.media import KINDS, NAMES

IMAGE = VOCAB - 2


def with_image_tokens(name="image_token_id"):
    model = tiny()
    setattr(model.config, name, IMAGE)
    return model


def prompt_with(*tokens):
    return torch.tensor([3, 4, 5, *tokens, 6])


def loss_fn(logits, labels, i):
    return torch.nn.functional.cross_entropy(logits, labels)


def refused(name="image_token_id", place=3):
    words = f"a prompt has token {IMAGE} at position {place}, the {name} of the model's"
    return pytest.raises(UnsupportedModelError, match=words)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_with_one_is_refused_before_any_gradient(name, runtime):
    model = with_image_tokens(name)
    shared = SharedPrefix(model, runtime)
    group = dormouse.Group(prompt_with(IMAGE), [[7, 8]], [1.0])
    with refused(name):
        shared.backward(group, loss_fn)
    with refused(name):
        shared.score(group)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_with_one_is_refused(runtime):
    shared = SharedPrefix(with_image_tokens(), runtime)
    ids = torch.stack([torch.cat([prompt_with(token), torch.tensor([7, 8])]) for token in (9, IMAGE)])
    with refused():
        shared.score(ids, torch.ones_like(ids), keep=2)
    bounds, prompts = torch.tensor([0, 7, 14]), torch.tensor([5, 5])
    with refused():
        shared.score_packed(ids.flatten(), bounds, prompt_lengths=prompts)


def test_a_conversation_with_one_before_its_labels_is_refused(runtime):
    shared = SharedPrefix(with_image_tokens(), runtime)
    tokens = torch.cat([prompt_with(IMAGE), torch.tensor([7, 8])])

    def losses(logits, labels, i, positions):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    with refused():
        shared.backward([dormouse.Conversation(tokens, [(5, 7)], 1.0)], losses)


def test_text_is_accepted_and_so_is_one_that_a_policy_drew(runtime):
    shared = SharedPrefix(with_image_tokens(), runtime)
    scores = shared.score(dormouse.Group(prompt_with(), [[7, IMAGE, 8]], [1.0]))
    assert len(scores.log_probabilities[0]) == 3


def test_every_such_name_of_transformers_is_known():
    """Of the configurations whose models put features in the place of tokens."""
    from transformers import CONFIG_MAPPING

    found = set()
    for make in CONFIG_MAPPING.values():
        fields = {name for kind in make.__mro__ for name in vars(kind).get("__annotations__", ())}
        found |= {name for name in fields if name.endswith(("_token_id", "_token_index"))}
    # Others, such as image_start_token_id, are marks around features and stay embeddings.
    kinds = {name for name in found if name.count("_") == 2}
    assert {name for name in kinds if name.split("_")[0] in KINDS} == set(NAMES)
