"""One of two pipeline stages of Megatron, of which stage 1 fails while stage 0 waits for it.

``failing_stage.py DIRECTORY KIND``: :data:`KINDS`. As failing.py has it. With the environment of
torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("python", "python/tests_megatron", "benches")]

import conftest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from failing import leave  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

import cases  # noqa: E402
import dormouse  # noqa: E402
from dormouse.megatron.stage_step import StageStep  # noqa: E402

CASE = cases.Case(2, stages=2, dtype=torch.float32, weights=torch.float32)
# Stage 0 waits by then.
DELAY_S = 3.0


def raises() -> None:
    raise ValueError("a backward of one stage")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS = {"error": raises, "killed": dies}


@contextlib.contextmanager
def failing(directory: Path, kind: str):
    """Context in which this stage fails in the first backward of its list."""

    def fails(*args) -> None:
        time.sleep(DELAY_S)
        leave(directory, "failed")
        KINDS[kind]()

    with mock.patch.object(StageStep, "microbatch_backward", fails):
        yield


def main(directory: Path, kind: str) -> None:
    torch.set_num_threads(1)
    cases.join(CASE)
    model = cases.model_of(CASE)
    with conftest.a_runtime() as runtime:
        function = dormouse.megatron.share(get_forward_backward_func(), runtime=runtime)
        # The first call checks the model.
        cases.run(CASE, function, model, cases.batches_of())
        fails = failing(directory, kind) if dist.get_rank() == 1 else contextlib.nullcontext()
        try:
            with fails:
                cases.run(CASE, function, model, cases.batches_of())
        except (RuntimeError, ValueError) as error:
            leave(directory, f"heard.{dist.get_rank()}", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)
