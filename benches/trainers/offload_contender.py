"""A process that runs training steps in one way: ``offload_contender.py NAME``, of :data:`NAMES`.

Commands and answers are those of :mod:`contender`. All ways compute the mean loss of one batch of
token ids, and its gradients: the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys

from batches import draw
from contender import Contender, main

import dormouse


class Plain(Contender):
    def do_select(self, rows: int, length: int) -> dict:
        """Makes the batch, and runs a step that fills the buffers that later steps reuse."""
        self._batch = draw(rows * length, 0).view(rows, length)
        self._context = self._made_context()
        self._model.train()
        self._model.zero_grad()
        self._step()
        return {}

    def do_run(self) -> dict:
        reply = super().do_run()
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(memoryview(parameter.grad.contiguous().view(-1).numpy()).cast("B"))
        return {**reply, "digest": digest.hexdigest(), **self._figures()}

    def _step(self) -> tuple[float, str]:
        with self._context:
            loss = self._model(input_ids=self._batch, labels=self._batch, use_cache=False).loss
            loss.backward()
        return float(loss.detach()), ""

    def _made_context(self):
        return contextlib.nullcontext()

    def _figures(self) -> dict:
        return {}


class PlainLibc(Plain):
    """Without the preload library."""

    def do_run(self) -> dict:
        # Idle memory is what is in use, as with dormouse's heap, which the meter trims.
        ctypes.CDLL(None).malloc_trim(0)
        return super().do_run()


class Offloaded(Plain):
    in_place: bool | None = None

    def _made_context(self):
        return dormouse.offload(self._model, self._runtime, in_place=self.in_place)

    def _figures(self):
        report = self._context.report()
        rates = {
            name: report.prefix.get(name, 0) for name in ("write_bytes_per_s", "read_bytes_per_s")
        }
        return {
            "saved_bytes": report.saved_bytes,
            "window_bytes": report.window_bytes,
            "asleep_share": report.asleep_share,
            "file_share": report.file_bytes / (report.saved_bytes - report.window_bytes),
            "wait_seconds": report.wait_ns / 1e9,
            "stray_wakes": report.stray_wakes,
            **rates,
        }


class Copied(Offloaded):
    in_place = False


class SavedOnCpu(Plain):
    """torch's context: copies of all saved tensors in memory of the CPU."""

    def _made_context(self):
        from torch.autograd.graph import save_on_cpu

        return save_on_cpu()


NAMES = {
    "plain": Plain,
    "plain_libc": PlainLibc,
    "offload": Offloaded,
    "offload_by_copy": Copied,
    "torch_save_on_cpu": SavedOnCpu,
}


if __name__ == "__main__":
    main(NAMES[sys.argv[1]], sys.argv[1])
