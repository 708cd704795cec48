"""One rank of two, of which rank 1 fails in its loss while rank 0 waits in a reduction.

``failing_rank.py DIRECTORY KIND TRAINER [untold]``: :data:`KINDS`, :data:`TRAINERS`. Rank 1 leaves
``failed`` in the directory, and rank 0 ``heard``: seconds of the machine's clock, and its error.
``untold``: without ``fail_together``. With the environment of torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches"), str(Path(__file__).parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import small_model  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from batches import padded  # noqa: E402
from failing import leave  # noqa: E402

import dormouse  # noqa: E402
from dormouse.hf import SharedPrefix  # noqa: E402

PROMPT, ROWS, LENGTH = 64, 2, 8
# Rank 0 waits by then.
DELAY_S = 3.0
# Of what a rank that is killed leaves behind.
CHILD_S = 120.0


def raises() -> None:
    """The trainer catches it, and its process lives on."""
    raise ValueError("a loss of one rank")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_with_workers() -> None:
    """Workers of a data loader hold the sockets of the process."""
    if os.fork() == 0:
        time.sleep(CHILD_S)
        os._exit(0)
    dies()


KINDS = {"error": raises, "killed": dies, "killed_with_workers": dies_with_workers}


def in_ddp(model: torch.nn.Module):
    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return wrapped, lambda loss: loss.backward()


def in_deepspeed(model: torch.nn.Module):
    import deepspeed

    # It would be compiled first, and gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine, engine.backward


TRAINERS = {"ddp": in_ddp, "zero_2": in_deepspeed}


def main(directory: Path, kind: str, trainer: str, *untold: str) -> None:
    torch.set_num_threads(1)
    wrapped, backward = TRAINERS[trainer](small_model.load())
    ids, mask, keep = padded(PROMPT, ROWS, LENGTH)
    with dormouse.Runtime() as runtime:
        shared = SharedPrefix(wrapped, runtime)
        try:
            with contextlib.nullcontext() if untold else dormouse.fail_together():
                loss = shared.score(ids, mask, keep=keep).log_probabilities.sum()
                dist.barrier()
                if dist.get_rank() == 1:
                    time.sleep(DELAY_S)
                    leave(directory, "failed")
                    KINDS[kind]()
                backward(loss)
        except (RuntimeError, ValueError) as error:
            leave(directory, f"heard.{dist.get_rank()}", error=f"{type(error).__name__}: {error}")
            # The trainer of the failed rank does something else before it ends.
            time.sleep(CHILD_S if untold else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)
