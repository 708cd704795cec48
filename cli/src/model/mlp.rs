//! Weights of the MLPs of all layers: dense ones, and experts of which a token meets some.
//!
//! | family | layers with experts | experts, and those of a token | shared |
//! |---|---|---|---|
//! | `mixtral`, `gpt_oss` | all | `num_local_experts`, `num_experts_per_tok` of `intermediate_size` | |
//! | `olmoe` | all | `num_experts`, `num_experts_per_tok` of `intermediate_size` | |
//! | `qwen2_moe`, `qwen3_moe` | every `decoder_sparse_step`-th but `mlp_only_layers` | `num_experts`, … of `moe_intermediate_size` | `shared_expert_intermediate_size` and its gate (`qwen2_moe`) |
//! | `deepseek_v2`, `deepseek_v3` | from `first_k_dense_replace` on, every `moe_layer_freq`-th | `n_routed_experts`, … of `moe_intermediate_size` | `n_shared_experts` of `moe_intermediate_size` |

use super::config::{Config, Family};
use super::refuse;
use crate::DescriptionError;

/// Maximum experts of a layer.
const EXPERTS_MAX: u64 = 1 << 16;
/// Products of a gated MLP: gate, up, down.
const MATRICES: u128 = 3;

/// Sums over all layers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mlps {
    /// Weights that multiply a token.
    pub(super) linear_weights: u128,
    /// Weights of experts that a token is not routed to.
    pub(super) idle_weights: u128,
    /// Biases.
    pub(super) others: u128,
    /// Elements that a token's backward needs: inner rows, and rows that go to and come from experts.
    pub(super) inner: u128,
    pub(super) routed_rows: u128,
    /// Router scores.
    pub(super) scores: u128,
}

/// Experts of one layer.
#[derive(Clone, Copy, Debug)]
struct Experts {
    all: u64,
    of_token: u64,
    inner: u64,
    shared: u64,
}

impl Mlps {
    pub(super) fn of(config: &Config, name: &str, layers: u32) -> Result<Self, DescriptionError> {
        let wide = |value: u64| u128::from(value);
        let hidden = wide(config.hidden_size);
        let experts = Experts::of(config, name)?;
        let sparse = (0..u64::from(layers)).filter(|layer| config.has_experts(*layer)).count();
        let sparse = if experts.is_some() { sparse as u128 } else { 0 };
        let dense = u128::from(layers) - sparse;
        let mut sums = Self::default();
        if dense > 0 {
            let what = "intermediate_size";
            let seen = config.intermediate_size;
            let seen = seen.ok_or_else(|| refuse(name, what, "missing", "a whole number"))?;
            let inner = wide(config.dimension(name, what, seen)?);
            sums.linear_weights = dense * MATRICES * hidden * inner;
            sums.inner = dense * inner;
        }
        let Some(Experts { all, of_token, inner, shared }) = experts.filter(|_| sparse > 0) else {
            return Ok(sums);
        };
        let (all, of_token, inner, shared) = (wide(all), wide(of_token), wide(inner), wide(shared));
        let expert = MATRICES * hidden * inner;
        let gate = if config.family == Family::Qwen2Moe { hidden } else { 0 };
        let met = of_token * expert + MATRICES * hidden * shared + hidden * all + gate;
        sums.linear_weights += sparse * met;
        sums.idle_weights = sparse * (all - of_token) * expert;
        sums.inner += sparse * (of_token * inner + shared);
        sums.routed_rows = sparse * of_token;
        sums.scores = sparse * all;
        match config.family {
            Family::GptOss => {
                let biases = 2 * inner + hidden;
                sums.others = sparse * (all + of_token * biases);
                sums.idle_weights += sparse * (all - of_token) * biases;
            }
            // The correction of each expert's score.
            Family::DeepseekV3 => sums.others = sparse * all,
            _ => {}
        }
        Ok(sums)
    }
}

impl Experts {
    fn of(config: &Config, name: &str) -> Result<Option<Self>, DescriptionError> {
        let (what, all) = match config.family {
            Family::Mixtral | Family::GptOss => ("num_local_experts", config.num_local_experts),
            // transformers 5 writes the number of some of these under the other name.
            Family::Olmoe | Family::Qwen2Moe | Family::Qwen3Moe => {
                ("num_experts", config.num_experts.or(config.num_local_experts))
            }
            Family::DeepseekV2 | Family::DeepseekV3 => {
                ("n_routed_experts", config.n_routed_experts)
            }
            Family::Llama | Family::Qwen2 | Family::Qwen3 => return Ok(None),
        };
        let number = |what: &str, value: Option<u64>, least, most| {
            let accepted = format!("{least} to {most}");
            let Some(value) = value else {
                return Err(refuse(name, what, "missing", accepted));
            };
            if (least..=most).contains(&value) {
                return Ok(value);
            }
            Err(refuse(name, what, value, accepted))
        };
        let all = number(what, all, 1, EXPERTS_MAX)?;
        let of_token = number("num_experts_per_tok", config.num_experts_per_tok, 1, all)?;
        let (what, inner) = match config.family {
            Family::Mixtral | Family::GptOss | Family::Olmoe => {
                ("intermediate_size", config.intermediate_size)
            }
            _ => ("moe_intermediate_size", config.moe_intermediate_size),
        };
        let seen = inner.ok_or_else(|| refuse(name, what, "missing", "a whole number"))?;
        let inner = config.dimension(name, what, seen)?;
        let (what, shared) = match config.family {
            Family::Qwen2Moe => (
                "shared_expert_intermediate_size",
                config.shared_expert_intermediate_size.unwrap_or(0),
            ),
            Family::DeepseekV2 | Family::DeepseekV3 => {
                let count = config.n_shared_experts.unwrap_or(0);
                let count = number("n_shared_experts", Some(count), 0, EXPERTS_MAX)?;
                ("n_shared_experts · moe_intermediate_size", count * inner)
            }
            _ => ("", 0),
        };
        let shared = if shared == 0 { 0 } else { config.dimension(name, what, shared)? };
        Ok(Some(Self { all, of_token, inner, shared }))
    }
}
