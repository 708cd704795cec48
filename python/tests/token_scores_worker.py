"""One rank of test_token_scores.py: a differentiable call inside DistributedDataParallel over gloo.

``python token_scores_worker.py DIRECTORY GRAPHS [window | outputs]`` leaves ``gradients.RANK`` there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import a_runtime
from models import take_gradients, tiny
from test_token_scores import a_batch
from torch.nn.parallel import DistributedDataParallel

from dormouse.hf import SharedPrefix


def run_calls(shared, model, ids, mask, options) -> None:
    """Accumulation: the first backward is not reduced, the second reduces the sum."""
    for synchronises in (False, True):
        model.require_backward_grad_sync = synchronises
        shared.score(ids, mask, **options).log_probabilities.sum().backward()


def run_windows(shared, model, ids, mask, options) -> None:
    """Two steps of two microbatches: the last part of each is reduced."""
    for _ in range(2):
        model.require_backward_grad_sync = False
        window = shared.window(ids, mask, **options)
        window.part(slice(0, 1), is_last=False).log_probabilities.sum().backward()
        model.require_backward_grad_sync = True
        window.part(slice(1, None), is_last=True).log_probabilities.sum().backward()


def run_outputs(shared, model, ids, mask, options) -> None:
    """As :func:`run_calls`, of hidden states too."""
    for synchronises in (False, True):
        model.require_backward_grad_sync = synchronises
        scores = shared.score(ids, mask, outputs=["last_hidden_state"], **options)
        (scores.log_probabilities.sum() + scores.last_hidden_state.sum()).backward()


RUNS = {"calls": run_calls, "window": run_windows, "outputs": run_outputs}


def main(directory: Path, graphs: str, kind: str = "calls") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(tiny())
    # As on a GPU, where a forward's arguments are moved to it.
    model.device_ids = [0]
    ids, mask, keep = a_batch()
    # Uneven shares: one rank has no prompt of the other's rows.
    own = slice(0, 3) if rank == 0 else slice(3, None)
    with a_runtime(64 << 20) as runtime:
        shared = SharedPrefix(model, runtime)
        RUNS[kind](shared, model, ids[own], mask[own], {"keep": keep, "graphs": graphs})
    torch.save(take_gradients(model.module), directory / f"gradients.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
