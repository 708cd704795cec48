"""A process that runs steps over one group in one way: ``contender.py NAME``, of :data:`NAMES`.

Commands and answers are those of :mod:`dormouse.demo.worker`. All ways compute the sum of the
log-probabilities of a group's responses from one padded batch, and its gradients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).parent)]

import small_model  # noqa: E402
import torch  # noqa: E402
from batches import padded  # noqa: E402

import dormouse  # noqa: E402
from dormouse.demo.memory import Memory, PeakMeter  # noqa: E402
from dormouse.demo.worker import serve  # noqa: E402
from dormouse.hf import SharedPrefix, log_probabilities  # noqa: E402

NVME_DIR = ROOT / "target" / "bench" / "nvme-trainers"
NVME_FILE_BYTES = 4 << 30


class Contender:
    def __init__(self, runtime: dormouse.Runtime):
        self._runtime = runtime
        self._model = small_model.load()
        self._batch = None

    def do_select(self, prompt: int, responses: int, length: int) -> dict:
        """Makes the batch, and runs a step that fills the buffers that later steps reuse."""
        self._batch = padded(prompt, responses, length)
        self._model.zero_grad()
        self._step()
        return {}

    def do_run(self) -> dict:
        self._model.zero_grad()
        meter = PeakMeter(Memory(self._runtime))
        meter.idle()
        meter.on_phase("step")
        clocks = time.perf_counter, time.process_time, time.thread_time
        starts = [clock() for clock in clocks]
        total, mode = self._step()
        seconds, cpu_seconds, thread_seconds = (
            clock() - start for clock, start in zip(clocks, starts, strict=True)
        )
        meter.on_phase("end")
        norms = [float(p.grad.double().square().sum()) for p in self._model.parameters()]
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            # Of the trainer's thread alone.
            "thread_seconds": thread_seconds,
            "peak_bytes": meter.step_peak()["resident"],
            "total": total,
            "gradient_norm": sum(norms) ** 0.5,
            "mode": mode,
        }

    def _step(self) -> tuple[float, str]:
        """Returns the sum, and which way was chosen."""
        values, mode = self._log_probabilities()
        total = values.sum()
        total.backward()
        return float(total.detach()), mode

    def _log_probabilities(self) -> tuple[torch.Tensor, str]:
        raise NotImplementedError



class Dormouse(Contender):
    sleep = False

    def __init__(self, runtime):
        super().__init__(runtime)
        self._shared = SharedPrefix(self._model, runtime, sleep=self.sleep)

    def _log_probabilities(self):
        ids, mask, keep = self._batch
        scores = self._shared.score(ids, mask, keep=keep)
        return scores.log_probabilities, scores.graphs


class Asleep(Dormouse):
    sleep = True


class Grouper(Contender):
    """PrefixGrouper: the group as one row. The head runs at the responses alone; the library's
    documentation splits the logits of all tokens, which takes longer."""

    def __init__(self, runtime):
        from transformers import AttentionInterface

        super().__init__(runtime)
        AttentionInterface.register("grouped", grouped_attention)
        self._model.set_attn_implementation("grouped")

    def _log_probabilities(self):
        from prefix_grouper import PrefixGrouper

        ids, mask, keep = self._batch
        prompts, masks = ids[:1, :-keep], mask[:1, :-keep]
        responses, of_responses = ids[:, -keep:], mask[:, -keep:]
        grouper = PrefixGrouper.from_ungrouped_masks(
            masks, of_responses, group_sizes=len(ids), padding_mode="right"
        )
        row = grouper.concat_input(prompts, masks, responses, of_responses)
        start = prompts.shape[1]
        starts = [range(start, start + int(each.sum())) for each in of_responses]
        positions = torch.tensor([*range(start), *(p for each in starts for p in each)])
        hidden = self._model.model(
            row,
            # All of the row: the library has masks of its own.
            attention_mask=None,
            position_ids=positions[None],
            use_cache=False,
            prefix_grouper=grouper,
            mask_of_responses=causal(grouper.suffix_attn_mask, start),
        ).last_hidden_state
        _, _, suffixes, has = grouper.split_output(hidden, include_prefix_last=1)
        at = has[:, 1:].bool()
        logits = self._model.lm_head(suffixes[:, :-1][at])
        return log_probabilities(logits, responses[at]), "kept"


def causal(has_key: torch.Tensor, start: int) -> torch.Tensor:
    """``[rows, keys]`` as a mask ``[rows, 1, queries, keys]``; queries begin at key ``start``."""
    keys = torch.arange(has_key.shape[1])
    return (keys <= keys[start:, None])[None, None] & has_key[:, None, None, :].bool()


def grouped_attention(
    module, query, key, value, attention_mask, *, prefix_grouper, mask_of_responses, **options
):
    """PrefixGrouper's attention by transformers' SDPA; its own is made for FlashAttention's masks."""
    from prefix_grouper.forward import AttentionForward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(q, k, v, _, **options):
        mask = None if q.shape[2] == k.shape[2] else mask_of_responses
        return sdpa_attention_forward(module, q, k, v, mask, **options)[0]

    return AttentionForward(attend)(prefix_grouper, query, key, value, **options), None


NAMES = {"prefixgrouper": Grouper, "awake": Dormouse, "asleep": Asleep}


def main(kind: type[Contender], name: str) -> None:
    """Runs a contender on standard input and output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    # With more, threads of a machine that others use too wait for each other.
    torch.set_num_threads(1)
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    with dormouse.Runtime(nvme_dir=NVME_DIR, nvme_file_bytes=NVME_FILE_BYTES) as runtime:
        contender = kind(runtime)
        emit({"reply": {"ready": name}})
        serve(contender, sys.stdin, emit)


if __name__ == "__main__":
    main(NAMES[sys.argv[1]], sys.argv[1])
