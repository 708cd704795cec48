"""Bytes that kept rows have asleep between the two passes of a shared step, by the share of response
tokens that are dropped: JSON on stdout.

    LD_PRELOAD=target/release/libdormouse_preload.so .venv/bin/python benches/history/filter_asleep.py 0 40

SmolLM2-135M in FP32, one prompt and four responses of docs/method.md, graphs kept; dropped are the
tokens with the least losses.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import torch  # noqa: E402

import dormouse  # noqa: E402
from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.hf import SharedPrefix, top_share  # noqa: E402

PROMPT, RESPONSES, TOKENS = 512, 4, 384
MICROBATCH_TOKENS = 2 * TOKENS
FILE_BYTES = 8 << 30
TEXT = ROOT / "docs" / "method.md"


def main() -> None:
    source = demo_model.find()
    model = demo_model.load_model(source)
    tokens = torch.tensor(demo_model.load_tokenizer(source)(TEXT.read_text())["input_ids"])
    prompt, rest = tokens.tensor_split([PROMPT])
    responses = rest[: RESPONSES * TOKENS].view(RESPONSES, TOKENS)
    ids = torch.cat([prompt.expand(RESPONSES, -1), responses], dim=1)
    mask = torch.ones_like(ids)
    options = {"keep": TOKENS, "graphs": "kept", "microbatch_tokens": MICROBATCH_TOKENS}
    found = {}
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "target") as folder,
        dormouse.Runtime(nvme_dir=folder, nvme_file_bytes=FILE_BYTES) as runtime,
    ):
        shared = SharedPrefix(model, runtime)
        with torch.no_grad():
            losses = -shared.score(ids, mask, keep=TOKENS).log_probabilities
        for percent in map(int, sys.argv[1:]):
            kept = top_share(losses, torch.zeros_like(losses), 1 - percent / 100)
            scores = shared.score(ids, mask, token_filter=kept, **options)
            found[percent] = sum(report.asleep_bytes for report in scores.filtered)
            (scores.log_probabilities * kept).sum().backward()
            del scores
    print(json.dumps(found))


if __name__ == "__main__":
    main()
