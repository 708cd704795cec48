"""Records what real PyTorch asks its allocator for, on the stand-in GPU (`make lib standin` first).

    python benches/traces/record.py dense_update       # -> benches/traces/dense_update.csv.xz
    python benches/traces/record.py --all

Each workload runs in a process of its own, with torch's own allocator and its memory history.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from builder import Builder
from command import HERE, chosen
from entries import replay
from format import EVENTS_MAX, Trace, write

ROOT = HERE.parents[1]
STANDIN = ROOT / "target" / "standin"
TOTAL_BYTES = 200 << 30  # of the stand-in GPU; only what is written has memory behind it
WORKER = "--worker"
SECONDS_MAX = 600
NAMES = ("demo_update", "dense_update", "pipeline_interleave", "variable_length")


def main(arguments: list[str] | None = None) -> int:
    names, folder = chosen(arguments, NAMES, __doc__)
    if not (STANDIN / "libcuda.so.1").exists():
        print(f"record: no {STANDIN.relative_to(ROOT)}/libcuda.so.1; run `make lib standin`")
        return 2
    for name in names:
        subprocess.run(
            [sys.executable, __file__, WORKER, name, str(folder)],
            env=_environment(),
            check=True,
            timeout=SECONDS_MAX,
        )
    return 0


def _environment() -> dict[str, str]:
    places = [ROOT / "python", ROOT / "python" / "tests_gpu"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "LD_PRELOAD": str(next(STANDIN.glob("libcudart.so.*"))),
        "LD_LIBRARY_PATH": str(STANDIN),
        "STANDIN_CUDA_TOTAL_BYTES": str(TOTAL_BYTES),
        # Whatever is let go in the order of a set is let go in the same order every time.
        "PYTHONHASHSEED": "0",
        # Knobs of torch's allocator change what it is asked for nowhere, and its figures below.
        "PYTORCH_ALLOC_CONF": "",
        "PYTORCH_CUDA_ALLOC_CONF": "",
    }


def worker(name: str, folder: Path) -> None:
    """Runs one workload and writes its trace."""
    import blas  # noqa: F401  matrix products that do nothing: the real cuBLAS does not start here
    import history
    import torch
    from workloads import WORKLOADS

    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    with history.recording() as recorder:
        workload.run()
    entries = recorder.entries
    if len(entries) > EVENTS_MAX:
        raise SystemExit(f"record: {len(entries)} entries; accepted: at most {EVENTS_MAX}")
    made = Builder()
    replay(entries, made)
    about = {
        "about": workload.about,
        "command": f"python benches/traces/record.py {name}",
        "recorded-with": f"torch {torch.__version__}, stand-in GPU, torch's own allocator",
    }
    about |= {f"torch-{name}": str(value) for name, value in recorder.figures.items()}
    if len({event.stream for event in made.events}) > 1:
        # Torch reuses a block of several streams when it happens to find them done.
        del about["torch-peak-reserved-bytes"]
    path = folder / f"{name}.csv.xz"
    write(path, Trace(about, made.events))
    print(f"{path.name}: {len(made.events)} events, {path.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
