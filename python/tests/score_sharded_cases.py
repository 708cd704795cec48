"""The calls under ``fully_shard`` that test_score_sharded.py holds against the padded batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import peft
import torch
from models import tiny
from padded_batch import padded_values
from test_token_scores import a_batch

RANKS = 2


@dataclass(frozen=True)
class Case:
    spread: str = "layers"
    """Where the weights are sharded: see score_sharded_worker.py."""
    graphs: str = "kept"
    how: str = "one call"
    """What is called: see score_sharded_worker.py."""
    times: float = 1.0
    """How often the gradient of the batch is added."""
    shares: tuple[slice, slice] = (slice(0, 3), slice(3, None))
    """Rows of each rank. One has no prompt of the other's."""
    model: dict = field(default_factory=dict)
    trainable: str = ""
    """Only parameters with this in their name are trained."""
    adapted: bool = False


CASES = {
    "kept": Case(),
    "twice": Case(graphs="twice"),
    "only the model as a whole": Case("root only"),
    "shards within layers": Case("nested", graphs="twice"),
    "decoder and head as well": Case("every level"),
    "replicated shards": Case("replicated"),
    "shards of replicas": Case("hybrid", graphs="twice"),
    "columns": Case("columns"),
    "on the host": Case("offloaded"),
    "kept gathered": Case("gathered"),
    "another divisor": Case("divided", times=RANKS / 5),
    "one rank without responses": Case(shares=(slice(0, 5), slice(5, 6))),
    "the same, twice": Case(shares=(slice(5, 6), slice(0, 5)), graphs="twice"),
    "one rank without rows": Case(shares=(slice(0, None), slice(0, 0))),
    "a window": Case(how="window"),
    "a window, twice": Case(how="window", graphs="twice"),
    "accumulated": Case(how="accumulated", times=2.0),
    "two calls, one backward": Case(how="together", times=2.0),
    "two calls, one backward, twice": Case(how="together", times=2.0, graphs="twice"),
    "beside the model's own forward": Case(how="own forward", times=2.0),
    "after an error of the loss": Case(how="error"),
    "after an error in a pass": Case(how="error in a pass", graphs="twice"),
    "after a call without a backward": Case(how="left"),
    "after calls without a graph": Case(how="no graph"),
    "beside a step": Case(how="step", times=2.0),
    "beside the model's own, one backward": Case(how="own in one", times=2.0),
    "the model's own first, one backward": Case(how="own first in one", times=2.0, graphs="twice"),
    "a forward between": Case(how="forward between"),
    "a forward between, twice": Case("gathered", how="forward between", graphs="twice"),
    "hidden states, three calls": Case(how="hidden states", times=2.0),
    "hidden states, three calls, twice": Case(how="hidden states", times=2.0, graphs="twice"),
    "frozen between": Case(how="frozen between"),
    "frozen between, twice": Case(how="frozen between", graphs="twice"),
    "a parameter without use": Case(how="unused"),
    "ranks agree first": Case(how="agreement"),
    "ranks of replicas agree first": Case("hybrid", how="agreement"),
    "tied weights": Case(model={"tie_word_embeddings": True}),
    "a layer is trained": Case(trainable="layers.1"),
    "adapters": Case(adapted=True),
    "adapters, twice": Case(adapted=True, graphs="twice"),
}
REFUSED = {
    "weights change before the backward": Case(how="update"),
    "weights change before the backward, twice": Case(how="update", graphs="twice"),
    "weights change by many at once": Case(how="foreach"),
    "weights change by many at once, twice": Case("replicated", how="foreach", graphs="twice"),
    "a weight left out": Case("without the norm"),
    "a split weight left out": Case("split norm"),
    "policies that differ": Case("policies"),
    "a hook of the reduction": Case("hooked"),
    "gradients that wait": Case(how="waiting"),
    "flattened": Case("FSDP1"),
}


def model_of(case: Case) -> torch.nn.Module:
    """The same on every rank, and in the test's own process."""
    model = tiny(num_hidden_layers=3, **case.model)
    if case.adapted:
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config).double()
    for name, parameter in model.named_parameters():
        if case.trainable not in name:
            parameter.requires_grad_(False)
    return model


def batch_of(case: Case, rank: int):
    ids, mask, keep = a_batch()
    rows = case.shares[rank]
    return ids[rows], mask[rows], keep


def row_losses(logps, entropies, mask) -> torch.Tensor:
    """Returns a loss of each row, not linear in the values. Depends on how many tokens it has."""
    weights = torch.linspace(-1, 2, logps.shape[1], dtype=logps.dtype)
    values = torch.tanh(0.3 * logps) * weights - 0.1 * entropies.square()
    return (values * mask).sum(1) * mask.sum(1)


def own_loss(model, ids, mask, keep) -> torch.Tensor:
    """Returns the loss of the padded batch."""
    return row_losses(*padded_values(model, ids, mask, keep), mask[:, -keep:]).sum()
