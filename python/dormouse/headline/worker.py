"""A worker process of the headline benchmark: one side's model, controlled over a pipe.

As in :mod:`dormouse.demo.worker`, a command is a line of JSON on standard input and answers are
lines of JSON on the original standard output. A command that fails is answered with its error and
the process continues, so that an error of one cell does not affect others.

An idle process gives back gradients and caches, and the dense side its weights too, so that two fit
one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import replace

import torch

import dormouse
from dormouse.errors import is_out_of_memory

from . import group as groups
from . import shapes, sides
from .figures import Meter, PhaseClock, used_bytes

SIDES = ("dense", "ours")


class Worker:
    """The commands of one process. Each method named ``do_*`` answers one."""

    def __init__(self, side: str, geometry: shapes.Geometry, device: torch.device, options: dict):
        self._geometry = geometry
        self._device = device
        self._side, self._installed = sides.make(side, geometry, device, options)
        self._model = self._side._model
        self._group: dormouse.Group | None = None
        self._loss = None

    def do_info(self) -> dict:
        """Returns torch's version, the device, its memory and the installed mode."""
        on_gpu = self._device.type == "cuda"
        info = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            "total_bytes": torch.cuda.mem_get_info(self._device)[1] if on_gpu else None,
            "parameter_bytes": sum(p.nbytes for p in self._model.parameters()),
        }
        if self._installed is not None:
            info |= {"mode": self._installed.mode, "why": list(self._installed.why)}
        return info

    def do_take(self, prompt: int, response: int, responses: int) -> dict:
        """Creates the group of the next runs."""
        vocab = self._geometry.vocab
        self._group = groups.synthetic(vocab, prompt, response, responses)
        self._loss = groups.DeviceGrpoLoss.synthetic(vocab, self._group, self._device)
        return {}

    def do_choose(self) -> dict:
        """Selects the fastest dense variant; returns the seconds per response of each."""
        self._zero_gradients()
        return self._side.choose(self._part(sides.BATCH_MAX), self._loss)

    def do_predict(self) -> dict:
        """Returns the plan's prediction for the group."""
        return self._side.predict(self._group)

    def do_run(
        self,
        way: str = shapes.EAGER,
        sleep: bool = True,
        responses: int | None = None,
        microbatch_tokens: int | None = None,
        peaks: bool = False,
    ) -> dict:
        """Runs one step on all or the first responses, from zeroed to final gradients.

        Returns ``seconds``, and those of each phase as ``phase_seconds``, or only
        ``out_of_memory`` with a sentence and ``report`` with the allocator's lines. With ``peaks``
        the bytes of each phase above idle in place of its seconds; reading them lengthens
        ``seconds``.
        """
        group = self._part(responses)
        self._zero_gradients()
        if peaks:
            self._trim()
        self._wait()
        meter = Meter(self._device) if peaks else None
        clock = PhaseClock(self._device)
        reply, start = {}, time.monotonic()
        try:
            tell = meter.on_phase if meter else clock.on_phase
            reply = self._side.step(
                group,
                self._loss,
                way,
                on_phase=tell,
                sleep=sleep,
                microbatch_tokens=microbatch_tokens,
            )
            self._wait()
            reply["seconds"] = time.monotonic() - start
        except (RuntimeError, dormouse.MemoryTierError) as error:
            if not (isinstance(error, dormouse.MemoryTierError) or is_out_of_memory(error)):
                raise
            reason, *report = str(error).splitlines()
            reply = {"out_of_memory": reason, "report": report}
        finally:
            phases = meter.close() if meter else None
        if meter and "seconds" in reply:
            reply |= {"phases": phases, "idle_bytes": meter.idle_bytes}
        elif "seconds" in reply:
            reply["phase_seconds"] = clock.seconds()
        return reply

    def do_budget(self, device_bytes: int | None) -> dict:
        """Limits the device bytes of the side's runtime; None takes the limit away."""
        self._side.limit(device_bytes)
        return {}

    def do_checkpoint(self, on: bool) -> dict:
        """Switches activation checkpointing of every layer."""
        self._side.checkpoint(on)
        return {}

    def do_rest(self) -> dict:
        """Releases what the side can do without until the next run."""
        self._model.zero_grad(set_to_none=True)
        self._side.rest()
        self._trim()
        return {"used_bytes": used_bytes(self._device)}

    def do_room(self) -> dict:
        """Returns the free bytes with parameters and gradients resident."""
        self._zero_gradients()
        self._trim()
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
        return {"free_bytes": free}

    def _part(self, responses: int | None) -> dormouse.Group:
        whole = self._group
        if responses is None or responses >= len(whole.responses):
            return whole
        return dormouse.Group(whole.prompt, whole.responses[:responses], whole.weights[:responses])

    def _zero_gradients(self) -> None:
        self._side.wake()
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _trim(self) -> None:
        gc.collect()
        self._wait()
        self._side.trim()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def serve(worker: Worker, commands, emit) -> None:
    """Answers commands until end of input or ``quit``."""
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        if name == "quit":
            return
        try:
            emit({"reply": getattr(worker, f"do_{name}")(**command)})
        except Exception as error:
            traceback.print_exc()
            emit({"error": f"{name}: {type(error).__name__}: {_first_line(error)}"})


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dormouse.headline.worker")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--geometry", choices=shapes.GEOMETRIES, required=True)
    parser.add_argument("--layers", type=int, required=True, help="of the geometry's, or fewer")
    parser.add_argument("--microbatch-tokens", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--runtime", type=json.loads, default={}, help="options, as JSON")
    options = parser.parse_args()
    # Answers use the original standard output; all other output goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    geometry = replace(
        shapes.GEOMETRIES[options.geometry],
        layers=options.layers,
        microbatch_tokens=options.microbatch_tokens,
    )
    worker = Worker(options.side, geometry, torch.device(options.device), options.runtime)
    emit({"reply": worker.do_info()})
    serve(worker, sys.stdin, emit)


if __name__ == "__main__":
    main()
