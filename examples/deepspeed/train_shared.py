"""A trainer of one's own with DeepSpeed: a small language model learns to prefer even tokens.

The section "DeepSpeed" of docs/trainers.md has the command that starts it.
"""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dormouse import Runtime
from dormouse.hf import SharedPrefix

VOCABULARY, PROMPT, RESPONSE, ROWS, UPDATES = 64, 96, 16, 8, 5
config = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": None,
}
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)


def generate():
    """Returns responses to one prompt, with it: ``[ROWS, PROMPT + RESPONSE]``."""
    prompts = torch.randint(3, VOCABULARY, (1, PROMPT)).repeat(ROWS, 1)
    length = {"min_new_tokens": RESPONSE, "max_new_tokens": RESPONSE}
    with torch.no_grad():
        return model.generate(prompts, do_sample=True, pad_token_id=0, **length)


if __name__ == "__main__":
    engine, *_ = deepspeed.initialize(model=model, config=config)
    shared = SharedPrefix(engine, Runtime())
    torch.manual_seed(engine.global_rank)
    for update in range(UPDATES):
        ids = generate()
        mask = torch.ones_like(ids)
        rewards = (ids[:, -RESPONSE:] % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logps = shared.score(ids, mask, keep=RESPONSE).log_probabilities
        loss = -(torch.exp(logps - logps.detach()) * advantages[:, None]).mean()
        engine.backward(loss)
        engine.step()
        rank, norm, reward = engine.global_rank, engine.get_global_grad_norm(), rewards.mean()
        print(f"rank {rank}: update {update}: {reward=:.3f}, {norm=:.4f}")
    deepspeed.comm.destroy_process_group()
