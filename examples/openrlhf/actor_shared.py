"""Updates of an actor with OpenRLHF's interface, a stand-in (stand_in.py), on a CPU: rollouts that
contain many of one token are rewarded. No download is needed, and nothing is generated.

    python -m dormouse run examples/openrlhf/actor_shared.py
"""

import torch
from stand_in import StandInActor
from transformers import LlamaConfig, LlamaForCausalLM

import dormouse.openrlhf

VOCAB, PROMPTS, SAMPLES, PROMPT, RESPONSE = 64, 2, 8, 96, 12


def rollouts(generator):
    """Rows as OpenRLHF has them: `SAMPLES` responses to each prompt, and the mask of actions."""
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT), generator=generator)
    prompts = prompts.repeat_interleave(SAMPLES, 0)
    responses = torch.randint(VOCAB, (PROMPTS * SAMPLES, RESPONSE), generator=generator)
    sequences = torch.cat([prompts, responses], 1)
    action_mask = torch.zeros_like(sequences)
    action_mask[:, PROMPT:] = 1
    score = (responses < VOCAB // 4).float().sum(1)
    advantages = (score - score.mean()) / score.std()
    # The mask has a column for every token but the first.
    return sequences, action_mask[:, 1:], torch.ones_like(sequences), advantages[:, None]


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip
    actor = dormouse.openrlhf.share(StandInActor)(model)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    for step in range(4):
        sequences, action_mask, attention_mask, advantages = rollouts(generator)
        with torch.no_grad():
            old = actor(sequences, action_mask, attention_mask)
        logps, output = actor(
            sequences, action_mask, attention_mask, return_output=True, return_entropy=True
        )
        entropy = (output.entropy * action_mask).sum() / action_mask.sum()
        ratio = torch.exp(logps - old) * action_mask
        loss = -(ratio * advantages).sum() / action_mask.sum() - 1e-3 * entropy
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.4f}, entropy {entropy:.4f}")
