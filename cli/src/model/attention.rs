//! Weights of a layer's attention.
//!
//! | kind | queries | keys and values | output |
//! |---|---|---|---|
//! | grouped queries | `h·a·d` | `2·h·k·d` | `a·d·h` |
//! | latent, with ranks q and r | `h·q + q·a·(n + p)`, or `h·a·(n + p)` without q | `h·(r + p) + r·a·(n + v)` | `a·v·h` |
//!
//! h: hidden size; a, k: heads of queries and of keys; d: elements of a head; n, p, v: elements of a head
//! without and with rotary embedding, and of a value. Latent attention presents its keys and values as a head of
//! `n + p` and one of `v` elements each: in a shape, heads of `(n + p + v) / 2`, which has the same bytes and
//! products.

use super::config::Config;
use super::refuse;
use crate::DescriptionError;

/// Weights and sizes of one layer's attention.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attention {
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    /// Weights that multiply a token.
    pub(super) query_weights: u64,
    pub(super) kv_weights: u64,
    pub(super) output_weights: u64,
    /// Other parameters: biases, norms of queries and keys, sinks.
    pub(super) others: u64,
    /// Elements of latents, which have norms.
    pub(super) latents: u64,
}

impl Attention {
    pub(super) fn of(config: &Config, name: &str) -> Result<Self, DescriptionError> {
        let heads = config.dimension(name, "num_attention_heads", config.num_attention_heads)?;
        if config.family.has_latents() {
            return Self::latent(config, name, heads);
        }
        let hidden = config.hidden_size;
        let kv_heads = config.num_key_value_heads.unwrap_or(heads);
        let kv_heads = config.dimension(name, "num_key_value_heads", kv_heads)?;
        let head_dim = config.head_dim.unwrap_or(hidden / heads);
        let head_dim = config.dimension(name, "head_dim", head_dim)?;
        let queries = config.dimension(name, "num_attention_heads · head_dim", heads * head_dim)?;
        let keys = config.dimension(name, "num_key_value_heads · head_dim", kv_heads * head_dim)?;
        let biases = config.family.attention_biases(config.attention_bias, hidden, queries, keys);
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            query_weights: hidden * queries,
            kv_weights: 2 * hidden * keys,
            output_weights: queries * hidden,
            others: biases + config.family.head_norms(queries, keys, head_dim, heads),
            latents: 0,
        })
    }

    fn latent(config: &Config, name: &str, heads: u64) -> Result<Self, DescriptionError> {
        let named = |what: &'static str, value: Option<u64>| {
            let value = value.ok_or_else(|| refuse(name, what, "missing", "a whole number"))?;
            config.dimension(name, what, value)
        };
        let plain = named("qk_nope_head_dim", config.qk_nope_head_dim)?;
        let rotary = named("qk_rope_head_dim", config.qk_rope_head_dim)?;
        let value = named("v_head_dim", config.v_head_dim)?;
        let latent = named("kv_lora_rank", config.kv_lora_rank)?;
        let both = plain + rotary + value;
        if both % 2 != 0 {
            let what = "qk_nope_head_dim + qk_rope_head_dim + v_head_dim";
            return Err(refuse(name, what, both, "an even number"));
        }
        let hidden = config.hidden_size;
        let head = plain + rotary;
        let all_heads = config.dimension(name, "num_attention_heads · head", heads * both)?;
        let queries = heads * head;
        let (query_weights, query_latent) = match config.q_lora_rank {
            None => (hidden * queries, 0),
            Some(rank) => {
                let rank = config.dimension(name, "q_lora_rank", rank)?;
                (hidden * rank + rank * queries, rank)
            }
        };
        let kv_weights = hidden * (latent + rotary) + latent * heads * (plain + value);
        debug_assert!(all_heads >= queries, "a head has a value");
        Ok(Self {
            heads,
            kv_heads: heads,
            head_dim: both / 2,
            query_weights,
            kv_weights,
            output_weights: heads * value * hidden,
            others: latent + query_latent,
            latents: latent + query_latent,
        })
    }

    /// Returns the weights that multiply a token.
    pub(super) fn linear_weights(&self) -> u64 {
        self.query_weights + self.kv_weights + self.output_weights
    }
}
