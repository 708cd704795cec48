"""One of four pipeline stages of Megatron, whose peak is planned and measured.

``peak_stage.py DIRECTORY`` leaves ``RANK.json``: of each call after the first, from which the stage
knows what its ops hold, what stage_peaks.py reads: ``within`` as little memory as the plan is
accepted in, and ``free`` to use more. With the environment of torchrun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("python", "python/tests_megatron")]

import conftest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

import cases  # noqa: E402
import dormouse  # noqa: E402
import long_rows  # noqa: E402
from stage_peaks import read_peaks  # noqa: E402

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
    with conftest.a_runtime(NVME_FILE_BYTES) as runtime:
        function = dormouse.megatron.share(
            get_forward_backward_func(), runtime=runtime, **CASE.share
        )
        first, *rest = (long_rows.batches_of(prompts, call) for call, prompts in enumerate(PROMPTS))
        cases.run(CASE, function, model, first)
        with read_peaks(runtime, within_plan=True) as within:
            for batches in rest:
                cases.run(CASE, function, model, batches)
        with read_peaks(runtime) as free:
            for batches in rest:
                cases.run(CASE, function, model, batches)
    found = {"within": within, "free": free}
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
