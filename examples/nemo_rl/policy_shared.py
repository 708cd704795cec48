"""Updates of a policy through the interface of NeMo-RL's worker, a stand-in (nemo_rl_stand_in.py),
on a CPU: rollouts that contain many of one token are rewarded. No download is needed.

    python -m dormouse run examples/nemo_rl/policy_shared.py
"""

import nemo_rl_stand_in as train
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dormouse.nemo_rl

VOCAB, PROMPTS, SAMPLES, PROMPT, RESPONSE = 64, 2, 8, 96, 12


def rollouts(generator):
    """Columns as NeMo-RL has them: `SAMPLES` responses to each prompt, and the mask of tokens."""
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT), generator=generator)
    prompts = prompts.repeat_interleave(SAMPLES, 0)
    responses = torch.randint(VOCAB, (PROMPTS * SAMPLES, RESPONSE), generator=generator)
    ids = torch.cat([prompts, responses], 1)
    rows, columns = ids.shape
    token_mask = torch.zeros(ids.shape)
    token_mask[:, PROMPT:] = 1
    score = (responses < VOCAB // 4).float().sum(1)
    advantages = (score - score.mean()) / score.std()
    return {
        "input_ids": ids,
        "input_lengths": torch.full((rows,), columns),
        "token_mask": token_mask,
        "sample_mask": torch.ones(rows),
        "advantages": advantages[:, None].expand(rows, columns),
    }


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    valid = {"global_valid_seqs": torch.tensor(16.0), "global_valid_toks": torch.tensor(192.0)}
    post = train.processors()
    dormouse.nemo_rl.share(train)
    for step in range(4):
        batch = train.microbatch_of(rollouts(generator))
        forward = train.forward_with_post_processing_fn
        with torch.no_grad():
            old, _, _ = forward(model, post.logprobs, batch)
        batch.data_dict["prev_logprobs"] = old
        loss, metrics, _ = forward(model, post.loss, batch, **valid)
        (-loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {-loss:.4f}, ratio {metrics['ratio'] / 192:.4f}")
