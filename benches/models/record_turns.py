#!/usr/bin/env python3
"""Records benches/models/turns.json: a branching batch of two turns, sampled from SmolLM2-135M.

The prompts and first answers are those of examples/rollouts. A second question follows each first
answer, and the model answers it several times. Deterministic for one build of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

from dormouse.demo import model as models  # noqa: E402
from dormouse.demo import record, trace  # noqa: E402

OUT = Path(__file__).with_name("turns.json")
GROUPS = ("alice-croquet", "alice-tea-party")
FIRST_ANSWERS, SECOND_ANSWERS = 3, 4
QUESTION = "Who else is mentioned in the passage, and what do they do?"
SEED = 7


def main() -> None:
    source = models.find()
    tokenizer = models.load_tokenizer(source)
    policy = models.load_model(source).eval()
    recorded = trace.read()
    text = f"\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    question = tokenizer(text, add_special_tokens=False)["input_ids"]
    generator = torch.Generator().manual_seed(SEED)
    prompts = []
    for name in GROUPS:
        group = recorded.load(name)
        answers = []
        for rollout in group.rollouts[:FIRST_ANSWERS]:
            first = rollout.tokens
            if first[-1] != tokenizer.eos_token_id:
                first = [*first, tokenizer.eos_token_id]
            before = [*group.prompt, *first, *question]
            second, _ = record.sample(policy, before, tokenizer.eos_token_id, generator)
            answers.append({"first": first, "second": second[:SECOND_ANSWERS]})
        prompts.append({"prompt": group.prompt, "answers": answers})
    OUT.write_text(json.dumps({"question": question, "prompts": prompts}) + "\n")


if __name__ == "__main__":
    main()
