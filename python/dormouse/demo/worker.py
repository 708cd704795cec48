"""A worker process of the demo: a model in one mode that runs commands from a pipe.

Each mode has its own process, because memory kept by one mode's allocator would hide the next
mode's peak. Processes stay alive between commands, so that timed runs of the modes can alternate. A
command is a line of JSON on standard input, ``{"do": name, ...}``; answers are lines of JSON on the
original standard output: any number of ``{"event": ...}``, then one ``{"reply": ...}`` or
``{"error": ...}``.

Modes: ``dense``; ``awake``, the shared schedule with nothing sleeping; ``asleep``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dormouse
import dormouse.hf

from . import checks, dense, gradcheck, trace
from . import model as models
from .grpo import GrpoLoss
from .memory import Memory, PeakMeter
from .modes import ASLEEP, DENSE, MODES, NVME_FILE_BYTES

# Responses of a dense warm-up: a third would repeat the second.
DENSE_WARM_RESPONSES = 2


class Worker:
    """The commands of one process. Each method named ``do_*`` answers one."""

    def __init__(self, mode: str, nvme_dir: Path | None, emit: Callable[[dict], None]):
        self._mode = mode
        self._emit = emit
        options = {}
        if mode == ASLEEP:
            options = {"nvme_dir": str(nvme_dir), "nvme_file_bytes": NVME_FILE_BYTES}
        self._runtime = dormouse.Runtime(**options)
        _check_preloaded(self._runtime)
        self._memory = Memory(self._runtime)
        self._meter: PeakMeter | None = None
        self._model = models.load_model(models.find())
        self._shared = None
        if mode != DENSE:
            self._shared = dormouse.hf.SharedPrefix(
                self._model, runtime=self._runtime, sleep=mode == ASLEEP
            )
        self._trace = trace.read()
        self.do_select()

    def do_select(self, group: str | None = None) -> dict:
        """Loads the named group, or the default one."""
        self._recorded = self._trace.load(group)
        self._group = group_of(self._recorded)
        self._loss = GrpoLoss.of(self._recorded.rollouts)
        return {
            "id": self._recorded.id,
            "prompt_tokens": len(self._recorded.prompt),
            "responses": len(self._recorded.rollouts),
            "response_tokens": [len(r.tokens) for r in self._recorded.rollouts],
        }

    def do_warm(self, microbatch_tokens: int) -> dict:
        """Runs one step, which creates the buffers that later steps reuse."""
        self._zero_gradients()
        group = self._group
        if self._mode == DENSE:
            group = dormouse.Group(
                group.prompt,
                group.responses[:DENSE_WARM_RESPONSES],
                group.weights[:DENSE_WARM_RESPONSES],
            )
        self._step(group, microbatch_tokens, on_phase=None)
        self._zero_gradients()
        return {}

    def do_idle(self) -> dict:
        """Sets the baseline of the next run's peaks."""
        self._zero_gradients()
        self._meter = PeakMeter(self._memory)
        return self._meter.idle()

    def do_run(self, microbatch_tokens: int, peaks: bool = False, digest: bool = False) -> dict:
        """Runs one timed step, from zeroed to final gradients. ``peaks``: also peaks above
        ``idle``."""
        self._zero_gradients()
        meter = self._meter if peaks else None
        gc.collect()
        cpu_before, wall_before = _cpu_seconds(), time.monotonic()
        step = self._step(self._group, microbatch_tokens, meter.on_phase if meter else None)
        reply = {
            "wall_seconds": time.monotonic() - wall_before,
            "cpu_seconds": _cpu_seconds() - cpu_before,
            **step,
        }
        if meter:
            reply["phases"] = meter.peaks
            reply["step_peak"] = meter.step_peak()
            self._meter = None
        if digest:
            reply["digest"] = gradient_digest(self._model)
            gradients = (parameter.grad for parameter in self._model.parameters())
            reply["gradient_norm"] = gradcheck.norm(gradients)
        return reply

    def do_predict(self, microbatch_tokens: int) -> dict:
        """Returns the plan's prediction."""
        return self._shared.predict(self._group, microbatch_tokens=microbatch_tokens)

    def do_info(self) -> dict:
        """Returns the runtime's device, tiers and rates, and torch's thread count."""
        return {**self._runtime.info(), "threads": torch.get_num_threads()}

    def do_grad_error(self) -> dict:
        """Returns distances to FP64 gradients on a shortened group. Leaves the model in FP64."""
        return checks.grad_error(self._model, self._shared, self._recorded)

    def do_dump(self, paths: list[str]) -> dict:
        """Writes the timeline in the format of each file's extension."""
        for path in paths:
            self._runtime.dump(path)
        return {}

    def _step(self, group, microbatch_tokens: int, on_phase: Callable[[str], None] | None) -> dict:
        if self._mode == DENSE:
            begin = on_phase or (lambda name: None)
            begin("step")
            loss = dense.backward(self._model, group, self._loss, self._tell_response)
            begin("end")
            return {"loss": loss}

        def told(name: str) -> None:
            if on_phase is not None:
                on_phase(name)
            self._emit({"event": "phase", "name": name})

        report = self._shared.backward(
            group, self._loss, microbatch_tokens=microbatch_tokens, on_phase=told
        )
        return {
            "loss": report.loss,
            "counts": report.counts,
            "prefix": report.prefix,
            "notes": list(report.notes),
        }

    def _tell_response(self, i: int) -> None:
        self._emit({"event": "response", "done": i + 1, "of": len(self._group.responses)})

    def _zero_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()


def group_of(recorded: trace.RolloutGroup) -> dormouse.Group:
    """Returns a recorded group as :class:`dormouse.Group`, with weights ``1/N``."""
    return dormouse.Group(recorded.prompt, [r.tokens for r in recorded.rollouts])


def gradient_digest(model) -> str:
    """Returns the SHA-256 of all gradients' bytes in parameter order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(memoryview(parameter.grad.contiguous().view(-1).numpy()).cast("B"))
    return digest.hexdigest()


def _check_preloaded(runtime) -> None:
    info = runtime.info()
    if "preload" not in info["modes"]:
        raise RuntimeError(
            "this process was not started under LD_PRELOAD=libdormouse_preload.so, so its tensors "
            f"are not on dormouse's heap ({info['unavailable_reason'] or 'no reason given'})"
        )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(worker: Worker, commands, emit: Callable[[dict], None]) -> None:
    """Runs commands until end of input or ``quit``."""
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        if name == "quit":
            return
        try:
            emit({"reply": getattr(worker, f"do_{name}")(**command)})
        except Exception as error:
            # Report any error to the parent before this process ends.
            emit({"error": f"{type(error).__name__}: {error}"})
            raise


def main(kind: type[Worker] = Worker) -> None:
    """Runs a worker on standard input and output."""
    parser = argparse.ArgumentParser(prog="python -m dormouse.demo.worker")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--nvme-dir", type=Path)
    options = parser.parse_args()
    # Answers use the original standard output; all other output goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    worker = kind(options.mode, options.nvme_dir, emit)
    emit({"reply": {"ready": options.mode}})
    serve(worker, sys.stdin, emit)


if __name__ == "__main__":
    main()
