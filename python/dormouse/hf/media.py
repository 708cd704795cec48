"""Tokens in whose place a model puts features of an image, a video or a sound.

A group has tokens alone. Without its features such a model embeds the token itself, without an error: the
values would be those of another input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from . import support
from .batch import Batch

KINDS = ("image", "video", "audio")
# Of the configurations of transformers.
NAMES = tuple(map("_".join, itertools.product(KINDS, ("token_id", "token_index"))))


def check(model: torch.nn.Module, batches: Sequence[Batch]) -> None:
    """Raises :class:`.UnsupportedModelError` if a prompt has such a token. In a response it is
    text: a policy may draw it."""
    config = getattr(model, "config", None)
    names = {
        getattr(each, name, None): name
        for each in (() if config is None else support.configurations(config))
        for name in NAMES
    }
    names.pop(None, None)
    if not names:
        return
    ids = torch.tensor(list(names), device="cpu")
    for stem in (stem for batch in batches for stem in batch.stems()):
        found = torch.isin(stem.tokens, ids).nonzero()
        if len(found):
            place = int(found[0])
            token = int(stem.tokens[place])
            raise support.UnsupportedModelError(
                f"a prompt has token {token} at position {place}, the {names[token]} of the model's "
                "configuration, in whose place the model puts features that a group does not have; "
                "accepted: prompts of text alone"
            )
