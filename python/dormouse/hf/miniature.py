"""Miniature batches of random tokens, which a check runs densely and shared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..group import Group
from ..tree import Conversation, Tree
from .support import ModelView, UnsupportedModelError

# Lengths of the miniature, in tokens. Few tokens and few passes: a pass costs what reading all
# weights and writing all gradients does.
PROMPT_TOKENS = 9
RESPONSE_TOKENS = (1, 13, 13)
# Rows of its microbatches: the responses of the shortest take two, the first of unequal lengths.
MICROBATCH_TOKENS = 14

TEXT_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id")


class Reach(NamedTuple):
    """How far a check goes where lengths matter; zeros where they do not."""

    tokens: int = 0
    """The longest sequence."""
    rows: int = 0
    """The longest microbatch with the prefixes before it."""


class Lengths(NamedTuple):
    """Lengths of a miniature group, in tokens."""

    prompt: int
    responses: tuple[int, ...]
    microbatch_tokens: int = MICROBATCH_TOKENS

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return self.prompt + max(self.responses)

    @property
    def rows(self) -> int:
        """The longest microbatch with the prompt before it."""
        return self.prompt + min(sum(self.responses), self.microbatch_tokens)


SHORT = Lengths(PROMPT_TOKENS, RESPONSE_TOKENS)
SHORTEST = Lengths(2, (PROMPT_TOKENS, 1))
# Of the responses that fill a long microbatch: the dense run is short.
FILLING_TOKENS = 13


def lengths_up_to(reach: Reach, config) -> list[Lengths]:
    """Returns the lengths of the miniature groups."""
    if reach.tokens == 0:
        return [SHORT]
    # A model with rotary positions may run beyond.
    positions = max(getattr(config, "max_position_embeddings", None) or sys.maxsize, reach.tokens)
    lengths = [SHORTEST, SHORT]
    while lengths[-1].longest < reach.tokens:
        prompt = 2 * lengths[-1].prompt
        response = min(prompt + 2, positions - prompt)
        if response < 1:
            break
        # In one microbatch: the rows of the second stand behind those of the first.
        lengths.append(Lengths(prompt, (response, 1), response + 1))
    if max(each.rows for each in lengths) < reach.rows:
        count = -(-(reach.rows - PROMPT_TOKENS) // FILLING_TOKENS)
        rows = count * FILLING_TOKENS
        lengths.append(Lengths(PROMPT_TOKENS, (FILLING_TOKENS,) * count, rows))
    return lengths


class Miniature:
    """Sequences of random tokens that begin alike, as a group or a tree.

    Its loss is a random linear function of the logits, different for each sequence and label.
    """

    def __init__(
        self,
        batch: Group | Tree,
        prompt_tokens: int,
        microbatch_tokens: int = MICROBATCH_TOKENS,
        rows: int = 0,
        shared_rows: Sequence[int] = (),
    ):
        """``prompt_tokens``: length of the shortest shared prefix. ``rows``: of the longest
        microbatch, with the prefixes before it. ``shared_rows``: of a tree, by sequence."""
        self.batch = batch
        self.prompt_tokens = prompt_tokens
        self.microbatch_tokens = microbatch_tokens
        self.rows = rows
        if isinstance(batch, Group):
            whole = [torch.cat([batch.prompt, response]) for response in batch.responses]
            labels = [[(prompt_tokens, len(tokens))] for tokens in whole]
            self.sequences = list(map(Conversation, whole, labels, batch.weights))
            shared_rows = [prompt_tokens - 1] * len(whole)
        else:
            self.sequences = batch.conversations
        self.shared_rows = shared_rows
        """Of each sequence: the number of rows that it shares."""

    @property
    def longest_tokens(self) -> int:
        """Length of the longest sequence."""
        return max(len(each.tokens) for each in self.sequences)

    def alone(self) -> Miniature:
        """Returns the longest sequence as a group."""
        tokens = max((each.tokens for each in self.sequences), key=len)
        prompt = self.prompt_tokens
        return Miniature(Group(tokens[:prompt], [tokens[prompt:]], [1.0]), prompt)

    def scored(self, logits: torch.Tensor, i: int) -> torch.Tensor:
        """Returns the logits of the labels of sequence ``i``. ``logits``: of all its rows."""
        rows = len(self.sequences[i].tokens) - 1
        if len(logits) != rows:
            raise UnsupportedModelError(
                f"the model returns logits of {len(logits)} of {rows} tokens; accepted: of every "
                "token"
            )
        return torch.cat([logits[a - 1 : b - 1] for a, b in self.sequences[i].labels])

    def loss(self, scored: torch.Tensor, i: int) -> torch.Tensor:
        """Returns the loss of sequence ``i``, unweighted, from the logits of all its labels."""
        return (scored * self._direction(scored, i)).sum()

    def recording_loss(self, pieces: dict[int, dict[int, torch.Tensor]]) -> Callable:
        """Returns the loss function of a shared step of the batch, which also keeps the logits, by
        sequence and first label."""

        def group_loss(logits, labels, i):
            pieces.setdefault(i, {})[0] = logits.detach()
            return self.loss(logits, i)

        def token_losses(logits, labels, i, positions):
            pieces.setdefault(i, {})[positions.start] = logits.detach()
            rows = self._rows(i, positions)
            return (logits * self._direction(logits, i)[rows]).sum(-1)

        return group_loss if isinstance(self.batch, Group) else token_losses

    def _rows(self, i: int, positions: range) -> slice:
        """Returns the labels at ``positions`` among all labels of sequence ``i``."""
        before = sum(
            max(0, min(end, positions.start) - begin) for begin, end in self.sequences[i].labels
        )
        return slice(before, before + len(positions))

    def _direction(self, like: torch.Tensor, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        count, vocab = sum(b - a for a, b in self.sequences[i].labels), like.shape[-1]
        return (torch.randn(count, vocab, generator=generator) * vocab**-0.5).to(like)


def group(view: ModelView, lengths: Lengths) -> Miniature:
    """Returns a miniature group."""
    draw = _drawing(view)
    weights = [(-1.0) ** i * (0.5 + 0.25 * i) for i in range(len(lengths.responses))]
    batch = Group(draw(lengths.prompt), [draw(n) for n in lengths.responses], weights)
    return Miniature(batch, lengths.prompt, lengths.microbatch_tokens, lengths.rows)


def tree(view: ModelView) -> Miniature:
    """Returns a miniature tree: two levels of prefixes, the second with labels of two weights, one
    conversation that ends inside it, and a response of a single token. Some rows carry no label, in
    prefixes and in microbatches, and in one microbatch all but one."""
    draw = _drawing(view)
    root, turn = draw(PROMPT_TOKENS), draw(8)
    at = len(root)
    inner = at + len(turn)
    tails = [draw(n) for n in (1, 13)]
    conversations = [
        Conversation(torch.cat([root, turn, tails[0]]), [(at, at + 4), (inner, inner + 1)], 0.5),
        Conversation(
            torch.cat([root, turn, tails[1]]),
            [(at + 2, at + 5), (inner + 3, inner + 5), (inner + 9, inner + 13)],
            -0.75,
        ),
        Conversation(torch.cat([root, turn[:6]]), [(at + 5, at + 6)], 1.25),
        Conversation(torch.cat([root, draw(13)]), [(at + 12, at + 13)], -1.0),
    ]
    # A row is shared if its label is.
    shared = [inner - 1, inner - 1, at + 5, at - 1]
    return Miniature(Tree(conversations), PROMPT_TOKENS, shared_rows=shared)


def _drawing(view: ModelView) -> Callable[[int], torch.Tensor]:
    """Returns a function that draws tokens: random text, with tokens that end or pad it."""
    generator = torch.Generator().manual_seed(0)
    special = [
        value
        for name, value in vars(view.config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    text: list[int] = []
    for name in TEXT_TOKENS:
        value = getattr(view.config, name, None)
        text += [value] if isinstance(value, int) else value or []
    text = [token for token in dict.fromkeys(text) if 0 <= token < view.vocab_size]
    allowed = torch.ones(view.vocab_size, dtype=torch.bool)
    allowed[[token for token in special if 0 <= token < view.vocab_size]] = False
    ids = allowed.nonzero().flatten()

    def draw(count: int) -> torch.Tensor:
        drawn = ids[torch.randint(len(ids), (count,), generator=generator)]
        # Code of the model may treat them otherwise: as padding, as ends of documents. Not at an
        # end, where transformers warns of padding.
        for place, token in zip(range(1, count - 2, 2), text, strict=False):
            drawn[place] = token
        return drawn

    return draw
