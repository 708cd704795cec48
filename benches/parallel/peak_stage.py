"""One of four pipeline stages of Megatron, whose peak is planned and measured.

``peak_stage.py DIRECTORY`` leaves ``RANK.json``: of each call after the first, from which the stage
knows what its ops hold, the planned peak of its list and that of the allocator, in bytes. With the
environment of torchrun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("python", "python/tests_megatron")]

import conftest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

import cases  # noqa: E402
import dormouse  # noqa: E402
import long_rows  # noqa: E402
from dormouse.megatron import stage  # noqa: E402

CASE = cases.Case(
    4,
    stages=4,
    dtype=torch.float32,
    weights=torch.float32,
    config=long_rows.CONFIG | {"num_layers": 8},
    share={"microbatch_tokens": 512},
)
# Of each call, tokens of the prompts; lengths differ from those that were measured.
PROMPTS = ((1200, 800, 1000, 600), (700, 1100, 900, 1300), (400, 1500, 500, 1000))
NVME_FILE_BYTES = 4 << 30


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    cases.join(CASE)
    model = cases.model_of(CASE)
    found = []
    own = stage.carry_out
    with conftest.a_runtime(NVME_FILE_BYTES) as runtime:

        def carry_out(of_stage: dict, *arguments) -> None:
            runtime.reset_peaks()
            before_bytes = runtime.stats()["allocated"]["current_bytes"]
            own(of_stage, *arguments)
            peak_bytes = runtime.stats()["allocated"]["peak_bytes"]
            found.append(
                {"planned": of_stage["peak"]["bytes"], "measured": peak_bytes - before_bytes}
            )

        function = dormouse.megatron.share(
            get_forward_backward_func(), runtime=runtime, **CASE.share
        )
        with mock.patch.object(stage, "carry_out", carry_out):
            for call, prompts in enumerate(PROMPTS):
                cases.run(CASE, function, model, long_rows.batches_of(prompts, call))
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
