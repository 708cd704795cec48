"""One rank of test_score_faults.py: batches at their edges, in DistributedDataParallel over gloo.

``python score_faults_worker.py DIRECTORY``, with the environment of torchrun, leaves
``gradients.RANK`` there: gradients by case and mode.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import a_runtime
from models import take_gradients, tiny
from test_score_faults import SHARES, a_longer_batch
from test_token_scores import GRAPHS
from torch.nn.parallel import DistributedDataParallel

from dormouse.hf import SharedPrefix


def evaluate_and_save(model, shared, ids, mask, options) -> None:
    """Between the call and its backward, while prompts sleep."""
    model.eval()
    with torch.no_grad():
        shared.score(ids, mask, **options)
    torch.save(model.module.state_dict(), io.BytesIO())
    model.train()


def gradients_of(name: str, graphs: str, runtime) -> dict[str, torch.Tensor]:
    share = SHARES[name][dist.get_rank()]
    model = DistributedDataParallel(tiny(num_hidden_layers=2))
    shared = SharedPrefix(model, runtime)
    ids, mask, keep = a_longer_batch()
    own = ids[share.rows], mask[share.rows]
    options = {"keep": keep, "graphs": graphs}
    for _ in range(2):
        # The second step is right too.
        model.zero_grad()
        scores = shared.score(*own, **options)
        if share.evaluates:
            evaluate_and_save(model, shared, *own, options)
        (scores.log_probabilities.sum() * share.weight).backward()
    return take_gradients(model.module)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with a_runtime(64 << 20) as runtime:
        found = {
            (name, graphs): gradients_of(name, graphs, runtime)
            for name in SHARES
            for graphs in GRAPHS
        }
    torch.save(found, directory / f"gradients.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
