"""Updates of verl's actor worker on a CPU: rollouts that contain many of one token are rewarded. No
download is needed, and nothing is generated: rollouts are random, as a first policy's are.

    python -m dormouse run examples/verl/actor_shared.py
"""

from pathlib import Path

import on_cpu
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

VOCAB, PROMPTS, SAMPLES, PROMPT, RESPONSE = 64, 2, 8, 96, 12
directory = Path("target/examples/verl/model")


def rollouts(generator):
    """A batch as verl's trainer has it: `SAMPLES` responses to each prompt, shuffled."""
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT), generator=generator)
    order = torch.randperm(PROMPTS * SAMPLES, generator=generator)
    prompts = prompts.repeat_interleave(SAMPLES, 0)[order]
    responses = torch.randint(VOCAB, (PROMPTS * SAMPLES, RESPONSE), generator=generator)
    score = (responses < VOCAB // 4).float().sum(1)
    ids, mask = torch.cat([prompts, responses], 1), torch.ones(len(prompts), PROMPT + RESPONSE)
    batch = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": mask.long().cumsum(1) - 1,
        "response_mask": mask[:, PROMPT:].long(),
        "prompts": prompts,
        "responses": responses,
        "advantages": ((score - score.mean()) / score.std())[:, None] * mask[:, PROMPT:],
    }
    return left_right_2_no_padding(tensordict_utils.get_tensordict(batch, {"temperature": 1.0}))


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2)
    ).save_pretrained(directory)  # fmt: skip
    with on_cpu.process_group():
        actor = on_cpu.worker(directory, model={"external_lib": "dormouse.verl.auto"})
        for step in range(4):
            batch = rollouts(generator)
            passes = {"global_token_num": [PROMPT + RESPONSE] * len(batch)}
            asked = batch.copy()
            tensordict_utils.assign_non_tensor(asked, compute_loss=False, **passes)
            old = actor.infer_batch(asked)
            batch["old_log_probs"] = no_padding_2_padding(old["log_probs"], batch)
            tensordict_utils.assign_non_tensor(
                batch, global_batch_size=len(batch), calculate_entropy=True, **passes
            )
            metrics = tensordict_utils.get(actor.train_batch(batch), "metrics")
            print(f"step {step}:", metrics["loss"])
