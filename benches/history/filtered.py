"""One step of SmolLM2-135M with a share of its rows dropped, in three ways: JSON on stdout.

    .venv/bin/python benches/history/filtered.py PERCENT
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.hf import FilterReport, token_filter, top_share  # noqa: E402

TOKENS = 1024
REPEATS = 3
TEXT = ROOT / "docs" / "method.md"
MASKED = "masked_rows"
# Of FP32 gradients of one thing, computed in two ways.
DISTANCE_MAX = 1e-4


class Steps:
    """Forward and backward of one sequence. ``keep``: the rows that are not dropped."""

    def __init__(self, percent: int):
        torch.set_num_threads(1)
        source = demo_model.find()
        self.model = demo_model.load_model(source)
        tokens = demo_model.load_tokenizer(source)(TEXT.read_text())["input_ids"]
        self.ids = torch.tensor([tokens[: TOKENS + 1]])
        self.ids, labels = self.ids[:, :-1], self.ids[:, 1:]
        with torch.no_grad():
            logits = self.model(input_ids=self.ids).logits[0]
            losses = functional.cross_entropy(logits, labels[0], reduction="none")
        self.keep = top_share(losses, torch.zeros_like(losses), 1 - percent / 100).unsqueeze(0)
        # Dropped from the loss in every way.
        self._labels = labels.masked_fill(~self.keep, -100).flatten()
        self.report = FilterReport()

    def loss(self) -> torch.Tensor:
        logits = self.model(input_ids=self.ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), self._labels)

    def run(self, backward: Callable[[torch.Tensor], object]) -> dict[str, float]:
        """CPU seconds of a backward, and of the step."""
        self.model.zero_grad(set_to_none=True)
        start = time.process_time()
        loss = self.loss()
        middle = time.process_time()
        backward(loss)
        end = time.process_time()
        return {"backward": end - middle, "step": end - start}

    def loss_alone(self) -> dict[str, float]:
        """Dropped tokens have no loss; their rows have a backward."""
        return self.run(torch.Tensor.backward)

    def masked(self) -> dict[str, float]:
        """Gradients are multiplied by the mask at every layer."""
        with self._masking():
            return self.run(torch.Tensor.backward)

    def filtered(self) -> dict[str, float]:
        """Dropped rows have no backward."""
        with token_filter(self.model) as rows:

            def backward(loss):
                self.report = rows.backward(loss, self.keep)

            return self.run(backward)

    def gradient(self) -> torch.Tensor:
        """The gradient of the last run."""
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    @contextlib.contextmanager
    def _masking(self):
        def zeroed(tensor, shape):
            tensor.register_hook(lambda grad: grad * self.keep.view(shape).to(grad.dtype))

        def attention(module, query, key, value, *arguments, **options):
            for tensor in (key, value):
                zeroed(tensor, (1, 1, -1, 1))
            return sdpa_attention_forward(module, query, key, value, *arguments, **options)

        AttentionInterface.register(MASKED, attention)
        AttentionMaskInterface.register(MASKED, sdpa_mask)
        config = self.model.config
        before, config._attn_implementation = config._attn_implementation, MASKED
        handles = [
            layer.register_forward_hook(lambda module, args, output: zeroed(output, (1, -1, 1)))
            for layer in self.model.model.layers
        ]
        try:
            yield
        finally:
            config._attn_implementation = before
            for handle in handles:
                handle.remove()


def main() -> None:
    steps = Steps(int(sys.argv[1]))
    ways = {"filtered": steps.filtered, "masked": steps.masked, "loss": steps.loss_alone}
    least: dict[str, dict[str, float]] = {}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(REPEATS):
        for name, way in ways.items():
            seconds = way()
            known = least.setdefault(name, seconds)
            least[name] = {what: min(known[what], seconds[what]) for what in seconds}
            if name not in gradients:
                gradients[name] = steps.gradient()
    exact, masked, filtered = (gradients[name] for name in ("loss", "masked", "filtered"))
    if not float((filtered - masked).norm() / masked.norm()) <= DISTANCE_MAX:
        raise RuntimeError("the filtered gradient is not the masked one")
    figures = {
        "tokens": TOKENS,
        "repeats": REPEATS,
        "seconds": least,
        "saved_bytes": steps.report.saved_bytes,
        "kept_bytes": steps.report.kept_bytes,
        "distance": float((filtered - exact).norm() / exact.norm()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
