"""How many tokens of a draft a model accepts, so that what is sampled keeps its distribution.

A draft is certain of its tokens. By speculative sampling (arXiv 2211.17192), a token x of it is
accepted with the probability p(x) that the model gives it; after a rejection the next token is drawn
from p without x, and after a whole draft from p. So each token is distributed as the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ArgumentError


def verify_greedy(logits: torch.Tensor, draft: Sequence[int]) -> list[int]:
    """Returns what greedy decoding emits: the accepted tokens of the draft and the model's own next.

    ``logits``: ``[len(draft) + 1, vocab]``, of the rows that predict the draft's tokens and the
    token after them. Raises :class:`dormouse.ArgumentError` for another shape.
    """
    _check(logits, draft, "logits")
    emitted = []
    for token, own in zip([*draft, None], logits.argmax(-1).tolist(), strict=True):
        emitted.append(own)
        if own != token:
            break
    return emitted


def verify_sampled(
    probabilities: torch.Tensor, draft: Sequence[int], generator: torch.Generator | None = None
) -> list[int]:
    """Returns sampled tokens: the accepted tokens of the draft, and one more.

    ``probabilities``: ``[len(draft) + 1, vocab]``, of the rows as for :func:`verify_greedy`, after
    temperature, top-k and the like; each row sums to 1. ``generator``: of the same device. Raises
    :class:`dormouse.ArgumentError` for another shape.
    """
    _check(probabilities, draft, "probabilities")
    device = probabilities.device
    emitted: list[int] = []
    for row, token in zip(probabilities, draft, strict=False):
        if float(torch.rand((), generator=generator, device=device)) < float(row[token]):
            emitted.append(token)
            continue
        rest = row.clone()
        rest[token] = 0
        # Of a token with all the probability nothing is left, and it is always accepted.
        emitted.append(int(torch.multinomial(rest, 1, generator=generator)))
        return emitted
    emitted.append(int(torch.multinomial(probabilities[-1], 1, generator=generator)))
    return emitted


def _check(rows: torch.Tensor, draft: Sequence[int], name: str) -> None:
    if rows.dim() != 2 or len(rows) != len(draft) + 1:
        raise ArgumentError(
            f"{name} are {list(rows.shape)} for a draft of {len(draft)} tokens; accepted: "
            f"[{len(draft) + 1}, vocab]"
        )
    for index, token in enumerate(draft):
        if not 0 <= token < rows.shape[1]:
            raise ArgumentError(
                f"token {index} of the draft is {token}; accepted: 0 to {rows.shape[1] - 1}"
            )
