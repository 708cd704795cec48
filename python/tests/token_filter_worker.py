"""One rank of test_token_filter_graph.py: ``python token_filter_worker.py DIRECTORY``, with the
environment of torchrun. Each has a batch of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import take_gradients, tiny
from test_token_filter import a_batch, filtered_backward, loss_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dormouse.hf import UnsupportedModelError

OPTIONS = {
    "plain": {},
    "small buckets that are the gradients": {
        "bucket_cap_mb": 0.05,
        "gradient_as_bucket_view": True,
    },
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    ids, keep = a_batch(2, 13, seed=rank)
    for name, options in OPTIONS.items():
        model = tiny()
        filtered_backward(model, ids, keep, loss_of(ids))
        alone = take_gradients(model)
        around = DistributedDataParallel(model, **options)
        for _ in range(2):
            # The second is reduced as the first was.
            filtered_backward(around, ids, keep, loss_of(ids))
            reduced = take_gradients(model)
        found[name] = {"alone": alone, "reduced": reduced}
    found["fully_shard"] = None
    try:
        filtered_backward(fully_shard(tiny()), ids, keep, loss_of(ids))
    except UnsupportedModelError as error:
        found["fully_shard"] = str(error)
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
