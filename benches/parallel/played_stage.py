"""One stage of a pipeline, whose work is played by sleeping: ``played_stage.py DIRECTORY``.

``given.json`` there has of each stage its list of the planner and the time of each op, and the
number of rounds. The list is carried out as the adapter of Megatron does, with its messages over
gloo; leaves ``RANK.json``: of each round, when it began and ended and how long ops took, in seconds
of the machine's clock. With the environment of torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "megatron")]

import on_cpu  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pipelines import COLUMNS  # noqa: E402

from dormouse.megatron.lists import Neighbours, carry_out  # noqa: E402

NS_PER_S = 1e9


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    request = json.loads((directory / "given.json").read_text())
    stage, op_ns = request["stages"][rank], request["op_ns"][rank]
    for op, nanoseconds in zip(stage["ops"], op_ns, strict=True):
        op["ns"] = nanoseconds
    dist.init_process_group("gloo")
    neighbours = Neighbours(dist.group.WORLD)
    busy = 0.0

    def room(rows: int) -> torch.Tensor:
        return torch.empty(rows, COLUMNS, dtype=torch.bfloat16)

    def run_op(op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal busy
        start = time.monotonic()
        time.sleep(op["ns"] / NS_PER_S)
        busy += time.monotonic() - start
        return room(op["sends"]["rows"]) if op["sends"] else None

    rounds = []
    for _ in range(request["rounds"]):
        busy = 0.0
        dist.barrier()
        start = time.monotonic()
        carry_out(stage, run_op, neighbours, lambda op: room(op["receives"]["rows"]))
        rounds.append({"start": start, "end": time.monotonic(), "busy": busy})
    (directory / f"{rank}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
