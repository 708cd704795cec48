"""Miniature batches of random tokens, which a check runs densely and shared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..group import Group
from ..tree import Conversation, Tree
from .outputs import PLAIN, Losses, Output, Request
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

    Its losses are random linear functions of what they read, different for each sequence and row.
    """

    def __init__(
        self,
        batch: Group | Tree,
        prompt_tokens: int,
        microbatch_tokens: int = MICROBATCH_TOKENS,
        rows: int = 0,
        shared_rows: Sequence[int] = (),
        request: Request = PLAIN,
        cuts: Sequence[torch.Tensor] = (),
    ):
        """``prompt_tokens``: length of the shortest shared prefix. ``rows``: of the longest
        microbatch, with the prefixes before it. ``shared_rows``: of a tree, by sequence.
        ``request``: what losses read. ``cuts``: see :meth:`.batch.Batch.plan`."""
        self.batch = batch
        self.request = request
        self.cuts = cuts
        self.prompt_tokens = prompt_tokens
        self.microbatch_tokens = microbatch_tokens
        self.rows = rows
        if isinstance(batch, Group):
            whole = [torch.cat([batch.prompt, response]) for response in batch.responses]
            labels = [[(prompt_tokens, len(tokens))] for tokens in whole]
            self.sequences = list(map(Conversation, whole, labels, batch.weights))
            for own, experts in zip(self.sequences, batch.routed_experts or (), strict=False):
                own.routed_experts = experts
            shared_rows = [prompt_tokens - 1] * len(whole)
        else:
            self.sequences = batch.conversations
        self.shared_rows = shared_rows
        """Of each sequence: the number of rows that it shares."""
        self.prompt_number = len(self.sequences)
        """In place of a sequence's number, for the loss of the prompt."""

    @property
    def longest_tokens(self) -> int:
        """Length of the longest sequence."""
        return max(len(each.tokens) for each in self.sequences)

    def with_experts(self, experts: Sequence[torch.Tensor]) -> Miniature:
        """Returns the same batch with recorded experts of each sequence. Rows that sequences share
        get those of the first."""
        own: list[torch.Tensor] = []
        for i, sequence in enumerate(self.sequences):
            merged = experts[i].clone()
            for before, other in zip(own, self.sequences, strict=False):
                count = min(_equal_tokens(sequence.tokens, other.tokens), len(before), len(merged))
                merged[:count] = before[:count]
            own.append(merged)
        if isinstance(self.batch, Group):
            group = self.batch
            batch = Group(group.prompt, group.responses, group.weights, routed_experts=own)
        else:
            batch = Tree(
                [
                    Conversation(each.tokens, each.labels, each.weight, routed_experts=recorded)
                    for each, recorded in zip(self.sequences, own, strict=True)
                ]
            )
        arguments = (self.prompt_tokens, self.microbatch_tokens, self.rows, self.shared_rows)
        return Miniature(batch, *arguments, request=self.request, cuts=self.cuts)

    def alone(self) -> Miniature:
        """Returns the longest sequence as a group."""
        tokens = max((each.tokens for each in self.sequences), key=len)
        prompt = self.prompt_tokens
        batch = Group(tokens[:prompt], [tokens[prompt:]], [1.0])
        return Miniature(batch, prompt, request=self.request)

    def read(self, output: Output, i: int) -> dict[int, Output]:
        """Returns what losses read of the rows of sequence ``i``: of its labels, and for the first
        sequence also of the prompt, by number. ``output``: of all its rows."""
        rows, request = len(self.sequences[i].tokens) - 1, self.request
        if len(output.logits) != rows:
            raise UnsupportedModelError(
                f"the model returns logits of {len(output.logits)} of {rows} tokens; accepted: of "
                "every token"
            )
        if isinstance(self.batch, Tree):
            output = output.with_only(request.response)
            spans = self.sequences[i].labels
            return {i: Output.joined([output.rows(a - 1, b - 1) for a, b in spans])}
        own = output.rows(self.prompt_tokens - 1, rows).with_only(request.response)
        prompt = output.rows(0, self.prompt_tokens - 1).with_only(request.prompt)
        if request.prompt:
            own = replace(own, prompt=prompt.without_logits())
        if i == 0 and request.has_prompt_loss:
            return {i: own, self.prompt_number: prompt}
        return {i: own}

    def loss(self, read: Output, number: int) -> torch.Tensor:
        """Returns the loss of a sequence or of the prompt, unweighted. ``read``: of all rows."""
        pairs = zip(read.tensors(), self._directions(read, number), strict=True)
        return torch.stack([(tensor * along).sum() for (_, tensor), along in pairs]).sum()

    def recording_losses(self, pieces: dict[int, dict[int, Output]]) -> Losses:
        """Returns the losses of a shared step of the batch, which also keep what they read, by
        number and first label."""

        def group_loss(given, labels, number=self.prompt_number):
            output = given if isinstance(given, Output) else Output(given)
            pieces.setdefault(number, {})[0] = output.detached()
            return self.loss(output, number)

        def token_losses(given, labels, i, positions):
            output = given if isinstance(given, Output) else Output(given)
            pieces.setdefault(i, {})[positions.start] = output.detached()
            count = sum(end - begin for begin, end in self.sequences[i].labels)
            rows = self._rows(i, positions)
            pairs = zip(output.tensors(), self._directions(output, i, count), strict=True)
            return sum((tensor * along[rows]).sum(-1) for (_, tensor), along in pairs)

        if isinstance(self.batch, Tree):
            return Losses(token_losses, request=self.request)
        has_prompt_loss = self.request.has_prompt_loss
        return Losses(group_loss, group_loss if has_prompt_loss else None, self.request)

    def _rows(self, i: int, positions: range) -> slice:
        """Returns the labels at ``positions`` among all labels of sequence ``i``."""
        before = sum(
            max(0, min(end, positions.start) - begin) for begin, end in self.sequences[i].labels
        )
        return slice(before, before + len(positions))

    def _directions(
        self, like: Output, number: int, count: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Yields the factors of each tensor. ``count``: of rows; None: as many as in ``like``."""
        generator = torch.Generator().manual_seed(number)
        for _, tensor in like.tensors():
            rows, width = len(tensor) if count is None else count, tensor.shape[-1]
            drawn = torch.randn(rows, width, generator=generator, device="cpu")
            yield (drawn * width**-0.5).to(tensor)


def _equal_tokens(a: torch.Tensor, b: torch.Tensor) -> int:
    """Returns the number of tokens with which both begin."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).int().cumprod(0).sum())


def group(
    view: ModelView, lengths: Lengths, request: Request = PLAIN, chunk_ends: Sequence[int] = ()
) -> Miniature:
    """Returns a miniature group. ``request``: what its losses read. ``chunk_ends``: where its
    prompt is cut, in tokens."""
    draw = _drawing(view)
    weights = [(-1.0) ** i * (0.5 + 0.25 * i) for i in range(len(lengths.responses))]
    batch = Group(draw(lengths.prompt), [draw(n) for n in lengths.responses], weights)
    cuts = [batch.prompt[:end] for end in chunk_ends]
    own = lengths.prompt, lengths.microbatch_tokens, lengths.rows
    return Miniature(batch, *own, request=request, cuts=cuts)


def tree(view: ModelView, request: Request = PLAIN) -> Miniature:
    """Returns a miniature tree: two levels of prefixes, the second with labels of two weights, one
    conversation that ends inside it, and a response of a single token. Some rows carry no label, in
    prefixes and in microbatches, and in one microbatch all but one. ``request``: what its losses
    read."""
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
    return Miniature(Tree(conversations), PROMPT_TOKENS, shared_rows=shared, request=request)


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
    allowed = torch.ones(view.vocab_size, dtype=torch.bool, device="cpu")
    allowed[[token for token in special if 0 <= token < view.vocab_size]] = False
    ids = allowed.nonzero().flatten()

    def draw(count: int) -> torch.Tensor:
        drawn = ids[torch.randint(len(ids), (count,), generator=generator, device="cpu")]
        # Code of the model may treat them otherwise: as padding, as ends of documents. Not at an
        # end, where transformers warns of padding.
        for place, token in zip(range(1, count - 2, 2), text, strict=False):
            drawn[place] = token
        return drawn

    return draw
