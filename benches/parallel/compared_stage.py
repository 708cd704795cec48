"""One of four pipeline stages of Megatron that compare what they are about to run.

``compared_stage.py DIRECTORY`` leaves ``RANK.json``: seconds of each comparison, which all stages
begin together. ``given.json`` there: ``prompts``, ``responses``, ``prompt_tokens``,
``response_tokens``. With the environment of torchrun.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("python", "python/tests_megatron")]

import conftest  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import cases  # noqa: E402
from dormouse.megatron.batches import Microbatch, places_of  # noqa: E402
from dormouse.megatron.plans import compare_plans  # noqa: E402

STAGES = cases.Case(4, stages=4)
# The first one opens connections.
ROUNDS = 6
VOCABULARY = 1 << 17


def microbatches_of(
    prompts: int, responses: int, prompt_tokens: int, response_tokens: int
) -> list[Microbatch]:
    """Returns a microbatch of each prompt."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(prompts):
        rows = torch.randint(
            VOCABULARY, (responses, prompt_tokens + response_tokens + 1), generator=generator
        )
        rows[:, :prompt_tokens] = rows[0, :prompt_tokens]
        mask = torch.zeros(responses, prompt_tokens + response_tokens)
        mask[:, prompt_tokens - 1 : -1] = 1
        found.append(Microbatch(rows[:, :-1], rows[:, 1:], mask))
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    cases.join(STAGES)
    # Compared over the ranks that hold its parts.
    gpt = cases.model_of(STAGES).module
    microbatches = microbatches_of(**json.loads((directory / "given.json").read_text()))
    places = places_of(microbatches)
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        compare_plans(microbatches, places, {}, False, gpt)
        seconds.append(time.perf_counter() - began)
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(seconds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
