"""Which values of a window a micro-batch gets."""

from __future__ import annotations

import pytest
import torch
from verl_runs import batch_of

from dormouse.hf.token_scores import TokenScores
from dormouse.hf.window import Window
from dormouse.verl.rows import COLUMN, OpenWindow, Rows


def jagged(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def settings(**changes) -> dict:
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2} | changes


def rows_of(**changes) -> Rows:
    from verl.utils import tensordict_utils

    data = batch_of()
    tensordict_utils.assign_non_tensor(data, **settings(**changes))
    return Rows.of(data, torch.float64)


def test_values_of_rows_in_any_order():
    """The value of a token is at the place of the token before it."""
    rows = rows_of()
    values = torch.arange(len(rows.ids), dtype=torch.float64)
    opened = OpenWindow(rows, Window(None, TokenScores(values, -values, "none")))
    bounds = rows.cu_seqlens.tolist()
    for numbers in ([5, 0], [7, 1, 2], [6, 3, 4]):
        tokens = [torch.arange(bounds[n], bounds[n + 1]) for n in numbers]
        found = opened.part({COLUMN: torch.tensor(numbers), "input_ids": jagged(tokens)})
        for own, got, negative in zip(
            tokens, found["log_probs"].unbind(), found["entropy"].unbind(), strict=True
        ):
            assert got[:-1].tolist() == own[1:].tolist()
            assert torch.equal(negative, -got)
    with pytest.raises(RuntimeError, match="after its last"):
        opened.part({COLUMN: torch.tensor([0]), "input_ids": jagged([torch.arange(3)])})


def test_what_a_batch_says():
    rows = rows_of()
    assert len(rows) == rows.responses == 8
    # verl's temperatures are FP32.
    assert rows.temperature == float(torch.tensor(0.8)) != 0.8
    assert not rows.with_entropies and rows_of(calculate_entropy=True).with_entropies
    # Two rows of the longest response; or the tokens that verl allows.
    assert rows.microbatch_tokens == 16
    assert rows_of(use_dynamic_bsz=True, max_token_len_per_gpu=60).microbatch_tokens == 60
