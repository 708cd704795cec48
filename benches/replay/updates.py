"""The process that replays the updates: ``updates.py SETTINGS``, JSON of :class:`Settings`.

All ways begin with the same weights and make each update in turn, so that their parameters are
compared after every one. Figures of updates go to ``updates.jsonl``, those of the end to
``end.json`` of the directory. A run that was ended goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).parent)]

import torch  # noqa: E402
from distances import against_truth, distance, norm, parameters_of, summary  # noqa: E402
from recorded import Batch, Size, batches  # noqa: E402
from samples import Sampler  # noqa: E402
from ways import Way, by_rows, dense_log_probabilities, whole  # noqa: E402

import dormouse  # noqa: E402
from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.hf import SharedPrefix  # noqa: E402

UPDATES_FILE, END_FILE, STATE_FILE = "updates.jsonl", "end.json", "state.pt"
CHECKPOINT_UPDATES = 25
NVME_FILE_BYTES = 4 << 30

# AdamW without decay of weights and a clipped norm, as trainers of GRPO have them.
LEARNING_RATE = 1e-5
NORM_MAX = 1.0

DENSE, SPLIT, SHARED, TRUTH = WAYS = ("dense", "split", "shared", "fp64")
FP32, BF16 = DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Settings:
    """What a run depends on, and its directory."""

    directory: str
    updates: int
    layers: int
    dtype: str
    size: dict[str, int]


class Contender:
    """A model, its optimizer, and the way its gradients are computed."""

    def __init__(self, model: torch.nn.Module, way: Way):
        self.model, self._way = model, way
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    def update(self, batch: Batch, old: torch.Tensor) -> tuple[float, float]:
        """Returns loss and norm of the gradients, before clipping."""
        loss = self._way(batch, old)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM_MAX)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, float(norm)


class Replay:
    def __init__(self, settings: Settings, runtime: dormouse.Runtime):
        self._settings, self._directory = settings, Path(settings.directory)
        self._batches = batches(Size(**settings.size))
        source = demo_model.find()
        self._start = demo_model.load_model(source)
        if not 1 <= settings.layers <= len(self._start.model.layers):
            raise ValueError(
                f"{settings.layers} layers; accepted: 1 to {len(self._start.model.layers)}"
            )
        self._start.model.layers = self._start.model.layers[: settings.layers]
        self._start.config.num_hidden_layers = settings.layers
        self._sampler = Sampler(demo_model.load_tokenizer(source), self._batches)
        with torch.no_grad():
            self._old = [dense_log_probabilities(self._start, each) for each in self._batches]
        self._norm = norm(parameters_of(self._start))
        self._contenders = {name: self._contender(name, runtime) for name in WAYS}

    def run(self) -> None:
        done = self._resume()
        with (self._directory / UPDATES_FILE).open("a") as lines:
            for number in range(done, self._settings.updates):
                lines.write(json.dumps(self._update(number)) + "\n")
                lines.flush()
                if (number + 1) % CHECKPOINT_UPDATES == 0:
                    self._save(number + 1)
        end = json.dumps(self._end(), indent=1)
        (self._directory / END_FILE).write_text(end + "\n")
        (self._directory / STATE_FILE).unlink(missing_ok=True)

    def _contender(self, name: str, runtime: dormouse.Runtime) -> Contender:
        model = copy.deepcopy(self._start)
        if name == TRUTH:
            model = model.double()
        narrow = self._settings.dtype == BF16 and name != TRUTH

        def context() -> contextlib.AbstractContextManager:
            return torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow)

        def dense(batch: Batch) -> torch.Tensor:
            with context():
                return dense_log_probabilities(model, batch)

        shared = SharedPrefix(model, runtime) if name == SHARED else None

        def by_prefix(batch: Batch) -> torch.Tensor:
            with context():
                scores = shared.score(batch.ids, batch.mask, keep=batch.keep)
            return scores.log_probabilities

        way = {SPLIT: by_rows(dense), SHARED: whole(by_prefix)}.get(name, whole(dense))
        return Contender(model, way)

    def _update(self, number: int) -> dict:
        index = number % len(self._batches)
        batch, old = self._batches[index], self._old[index]
        found = {name: each.update(batch, old) for name, each in self._contenders.items()}
        own = {name: parameters_of(each.model) for name, each in self._contenders.items()}
        start = parameters_of(self._start)

        def apart(name: str, other) -> float:
            return distance(own[name], other) / self._norm

        return {
            "group": batch.group,
            "loss": {name: loss for name, (loss, _) in found.items()},
            "norm": {name: norm for name, (_, norm) in found.items()},
            "from_dense": {name: apart(name, own[DENSE]) for name in (SPLIT, SHARED)},
            "from_truth": {name: apart(name, own[TRUTH]) for name in WAYS[:-1]},
            "from_start": apart(DENSE, start),
        }

    def _end(self) -> dict:
        own = {name: parameters_of(each.model) for name, each in self._contenders.items()}
        start = parameters_of(self._start)
        models = {"start": self._start}
        models |= {name: each.model for name, each in self._contenders.items()}
        return {
            "from_dense": {name: summary(own[name], own[DENSE]) for name in (SPLIT, SHARED)},
            "from_truth": {
                name: against_truth(start, own[TRUTH], own[DENSE], own[name])
                for name in (SPLIT, SHARED)
            },
            "samples": {name: self._sampler.samples(model) for name, model in models.items()},
        }

    def _save(self, done: int) -> None:
        state = {"settings": asdict(self._settings), "done": done}
        for name, each in self._contenders.items():
            state[name] = (each.model.state_dict(), each.optimizer.state_dict())
        staging = self._directory / f"{STATE_FILE}.part"
        torch.save(state, staging)
        # A checkpoint is complete or absent.
        staging.replace(self._directory / STATE_FILE)

    def _resume(self) -> int:
        """Returns the number of updates that were made, with the contenders as they were then."""
        path, lines = self._directory / STATE_FILE, self._directory / UPDATES_FILE
        done = 0
        if path.exists():
            state = torch.load(path, mmap=True)
            if state["settings"] == asdict(self._settings):
                done = state["done"]
                for name, each in self._contenders.items():
                    weights, moments = state[name]
                    each.model.load_state_dict(weights)
                    each.optimizer.load_state_dict(moments)
        kept = lines.read_text().splitlines(keepends=True)[:done] if done else []
        lines.write_text("".join(kept))
        return done


def main() -> None:
    # With more, threads of a machine that others use too wait for each other.
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[1]))
    files = Path(settings.directory) / "nvme"
    files.mkdir(parents=True, exist_ok=True)
    with dormouse.Runtime(nvme_dir=files, nvme_file_bytes=NVME_FILE_BYTES) as runtime:
        Replay(settings, runtime).run()


if __name__ == "__main__":
    main()
