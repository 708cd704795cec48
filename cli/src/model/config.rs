//! A Hugging Face `config.json` as a shape.
//!
//! Figures of a layer are means over all layers, which may differ. With hidden size h and b bytes per element
//! (`dtype` or `torch_dtype`; without one, the type of the weights beside the file, which transformers takes; without
//! those, assumed: bfloat16 for `gpt_oss` and weights in `mxfp4`, float32 for others); weights of attention and MLPs in
//! the modules of that name:
//!
//! | field of a shape | value |
//! |---|---|
//! | `layer_linear_weights` | those of attention and of the MLP that multiply one token |
//! | `kv_linear_weights` | those of keys and values |
//! | `last_layer_prefix_weights` | keys and values both ways, queries forward only: a third of their work |
//! | `head_weights` | `h·vocab_size` |
//! | `saved_bytes_per_token_layer` | `16·h + b·(2·h + 4·(a + k)·d + 4·i)`: two norms in FP32, queries, K and V before and after rotary embedding, the MLP's inner rows i |
//!
//! The last two match PyTorch's eager modules, as the Python package counts them. Latents add `8 + b` bytes per
//! element, for their norms; experts a row of h in and out for each that a token meets, and the router's scores
//! twice in FP32. The sliding attention of `gpt_oss` is counted as full: pairs, K and V are upper bounds.

use std::path::Path;

use dormouse_schedule::{LAYERS_MAX, ModelShape};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::attention::Attention;
use super::mlp::Mlps;
use super::{Model, Parameters, refuse, weights};
use crate::DescriptionError;
use crate::sequences::VOCAB_MAX;

/// Maximum dimension: sums of products of two fit 64 bits.
const DIMENSION_MAX: u64 = 1 << 24;
/// Maximum entries of `mlp_only_layers`.
const MLP_ONLY_MAX: usize = LAYERS_MAX as usize;

/// Architectures that the formulas describe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Family {
    #[default]
    Llama,
    Qwen2,
    Qwen3,
    Mixtral,
    Qwen2Moe,
    Qwen3Moe,
    Olmoe,
    GptOss,
    DeepseekV2,
    DeepseekV3,
}

const FAMILIES: &str = "llama, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, olmoe, gpt_oss, \
                        deepseek_v2, deepseek_v3";

/// Fields that are whole numbers.
const NUMBERS: &[&str] = &[
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "moe_layer_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
];

/// The fields read from a `config.json`, of all families.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Config {
    #[serde(rename = "model_type")]
    pub(super) family: Family,
    pub(super) hidden_size: u64,
    pub(super) intermediate_size: Option<u64>,
    num_hidden_layers: u64,
    pub(super) num_attention_heads: u64,
    pub(super) num_key_value_heads: Option<u64>,
    pub(super) head_dim: Option<u64>,
    vocab_size: u64,
    #[serde(alias = "torch_dtype")]
    dtype: Option<String>,
    quantization_config: Option<Value>,
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    pub(super) attention_bias: bool,
    pub(super) moe_intermediate_size: Option<u64>,
    pub(super) shared_expert_intermediate_size: Option<u64>,
    pub(super) num_experts: Option<u64>,
    pub(super) num_local_experts: Option<u64>,
    pub(super) n_routed_experts: Option<u64>,
    pub(super) n_shared_experts: Option<u64>,
    pub(super) num_experts_per_tok: Option<u64>,
    decoder_sparse_step: Option<u64>,
    #[serde(default)]
    mlp_only_layers: Vec<u64>,
    first_k_dense_replace: Option<u64>,
    moe_layer_freq: Option<u64>,
    pub(super) q_lora_rank: Option<u64>,
    pub(super) kv_lora_rank: Option<u64>,
    pub(super) qk_nope_head_dim: Option<u64>,
    pub(super) qk_rope_head_dim: Option<u64>,
    pub(super) v_head_dim: Option<u64>,
}

impl Family {
    pub(super) const fn has_latents(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3)
    }

    /// Returns the biases of a layer's attention.
    pub(super) const fn attention_biases(
        self,
        set: bool,
        hidden: u64,
        queries: u64,
        keys: u64,
    ) -> u64 {
        match self {
            Self::Qwen2 | Self::Qwen2Moe => queries + 2 * keys,
            Self::GptOss => queries + 2 * keys + hidden,
            _ if set => queries + 2 * keys + hidden,
            _ => 0,
        }
    }

    /// Returns the norms of a layer's queries and keys, and its sinks.
    pub(super) const fn head_norms(self, queries: u64, keys: u64, head: u64, heads: u64) -> u64 {
        match self {
            Self::Qwen3 | Self::Qwen3Moe => 2 * head,
            Self::Olmoe => queries + keys,
            Self::GptOss => heads,
            _ => 0,
        }
    }
}

/// Returns the model of a `config.json`, whose weights may be in `folder`.
pub(super) fn model(
    name: String,
    object: Map<String, Value>,
    folder: Option<&Path>,
) -> Result<Model, DescriptionError> {
    parse(&name, object)?.model(name, folder)
}

fn parse(file: &str, object: Map<String, Value>) -> Result<Config, DescriptionError> {
    if let Some(seen) = object.get("model_type").and_then(Value::as_str)
        && Family::deserialize(Value::from(seen)).is_err()
    {
        let accepted = format!("{FAMILIES}; for others, a file with the shape");
        return Err(refuse(file, "model_type", seen, accepted));
    }
    let no_number = |value: &Value| !value.is_u64() && !value.is_null();
    for what in NUMBERS {
        if let Some(seen) = object.get(*what).filter(|value| no_number(value)) {
            return Err(refuse(file, what, seen, "a whole number, 1 or more"));
        }
    }
    // A config has many more fields.
    serde_json::from_value(Value::Object(object)).map_err(|source| DescriptionError::Json {
        file: file.to_owned(),
        source,
        accepted: "a Hugging Face config.json".to_owned(),
    })
}

impl Config {
    /// Returns whether a layer has experts, if the family has any.
    pub(super) fn has_experts(&self, layer: u64) -> bool {
        match self.family {
            Family::Qwen2Moe | Family::Qwen3Moe => {
                let step = self.decoder_sparse_step.unwrap_or(1).max(1);
                (layer + 1).is_multiple_of(step) && !self.mlp_only_layers.contains(&layer)
            }
            Family::DeepseekV2 | Family::DeepseekV3 => {
                let frequency = self.moe_layer_freq.unwrap_or(1).max(1);
                layer >= self.first_k_dense_replace.unwrap_or(0) && layer.is_multiple_of(frequency)
            }
            _ => true,
        }
    }

    /// Returns a dimension if it is in range.
    pub(super) fn dimension(
        &self,
        name: &str,
        what: &str,
        seen: u64,
    ) -> Result<u64, DescriptionError> {
        if (1..=DIMENSION_MAX).contains(&seen) {
            return Ok(seen);
        }
        Err(refuse(name, what, seen, format!("1 to {DIMENSION_MAX}")))
    }

    fn model(&self, name: String, folder: Option<&Path>) -> Result<Model, DescriptionError> {
        if self.use_sliding_window {
            return Err(refuse(&name, "use_sliding_window", true, "false"));
        }
        let few = |what, seen: u64, most: u32| {
            let number = u32::try_from(seen).ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| refuse(&name, what, seen, format!("1 to {most}")))
        };
        if self.mlp_only_layers.len() > MLP_ONLY_MAX {
            let seen = format!("{} layers", self.mlp_only_layers.len());
            return Err(refuse(&name, "mlp_only_layers", seen, format!("at most {MLP_ONLY_MAX}")));
        }
        let hidden = self.dimension(&name, "hidden_size", self.hidden_size)?;
        let layers = few("num_hidden_layers", self.num_hidden_layers, LAYERS_MAX)?;
        let vocab = few("vocab_size", self.vocab_size, VOCAB_MAX)?;
        let (element, assumed_dtype) = self.element(&name, folder)?;
        let attention = Attention::of(self, &name)?;
        let mlps = Mlps::of(self, &name, layers)?;
        let too_large = || refuse(&name, "the number of parameters", "too large", "64 bits");
        let narrow = |value: u128| u64::try_from(value).map_err(|_| too_large());
        // Rounded up: a layer that is not there costs nothing.
        let mean = |sum: u128| narrow(sum.div_ceil(layers.into()));
        let (wide, all_layers) = (|value: u64| u128::from(value), u128::from(layers));
        let linear = all_layers * wide(attention.linear_weights()) + mlps.linear_weights;
        let embedding = wide(hidden) * wide(vocab.into());
        let embeddings = if self.tie_word_embeddings { embedding } else { 2 * embedding };
        let others = all_layers * wide(attention.others + 2 * hidden) + mlps.others + wide(hidden);
        let active = narrow(linear + others + embeddings)?;
        let all = narrow(linear + others + embeddings + mlps.idle_weights)?;
        let heads = attention.heads + attention.kv_heads;
        let saved = wide(16 * hidden + 8 * attention.latents)
            + wide(element)
                * (wide(2 * hidden + attention.latents) + 4 * wide(heads * attention.head_dim));
        let of_mlps = wide(element) * (4 * mlps.inner + 2 * wide(hidden) * mlps.routed_rows)
            + 8 * mlps.scores;
        let shape = ModelShape {
            layers,
            heads: attention.heads as u32,
            kv_heads: attention.kv_heads as u32,
            head_dim: attention.head_dim as u32,
            dtype_bytes: element as u32,
            layer_linear_weights: mean(linear)?,
            kv_linear_weights: attention.kv_weights,
            last_layer_prefix_weights: attention.kv_weights + attention.query_weights / 3,
            head_weights: narrow(embedding)?,
            saved_bytes_per_token_layer: mean(all_layers * saved + of_mlps)?,
        };
        let parameters = Some(Parameters { all, active });
        Ok(Model {
            name,
            vocab,
            shape,
            parameters,
            assumed_dtype: assumed_dtype.map(str::to_owned),
        })
    }

    /// Returns the bytes of an element, and its type if it is assumed: neither the config nor weights in `folder` say it.
    fn element(
        &self,
        name: &str,
        folder: Option<&Path>,
    ) -> Result<(u64, Option<&'static str>), DescriptionError> {
        let said = match &self.dtype {
            Some(dtype) => Some(dtype.as_str()),
            None => folder.map_or(Ok(None), weights::dtype)?,
        };
        match said {
            Some("bfloat16" | "float16") => Ok((2, None)),
            Some("float32") => Ok((4, None)),
            Some("float64") => Ok((8, None)),
            Some(other) => Err(refuse(name, "dtype", other, "bfloat16, float16, float32, float64")),
            None if self.family == Family::GptOss || self.is_mxfp4() => Ok((2, Some("bfloat16"))),
            None => Ok((4, Some("float32"))),
        }
    }

    /// Returns whether the published weights are in MXFP4, which transformers loads as bfloat16.
    fn is_mxfp4(&self) -> bool {
        let method = self.quantization_config.as_ref().and_then(|it| it.get("quant_method"));
        method.and_then(Value::as_str) == Some("mxfp4")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model_of(config: Value) -> Result<Model, DescriptionError> {
        let Value::Object(object) = config else { panic!("{config} is no object") };
        model("f".to_owned(), object, None)
    }

    fn small(family: &str) -> Value {
        json!({
            "model_type": family, "hidden_size": 10, "intermediate_size": 30,
            "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 3, "vocab_size": 100, "dtype": "bfloat16",
        })
    }

    #[test]
    fn a_shape_follows_the_formulas() {
        let model = model_of(small("llama")).unwrap();
        let wanted = ModelShape {
            layers: 7,
            heads: 4,
            kv_heads: 2,
            head_dim: 3,
            dtype_bytes: 2,
            layer_linear_weights: 10 * 12 + 12 * 10 + 2 * 10 * 6 + 3 * 10 * 30,
            kv_linear_weights: 2 * 10 * 6,
            last_layer_prefix_weights: 2 * 10 * 6 + 40,
            head_weights: 1000,
            saved_bytes_per_token_layer: 160 + 2 * (20 + 4 * 18 + 120),
        };
        assert_eq!((model.vocab, model.shape), (100, wanted));
        // As transformers has them where a config does not say.
        let plain = json!({
            "model_type": "llama", "hidden_size": 12, "intermediate_size": 30,
            "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 100,
        });
        let shape = model_of(plain).unwrap().shape;
        assert_eq!((shape.kv_heads, shape.head_dim, shape.dtype_bytes), (4, 3, 4));
    }

    /// The published `config.json` of gpt-oss has no `dtype`: its experts are in MXFP4, and all else in bfloat16.
    #[test]
    fn without_dtype_and_weights_one_is_assumed() {
        let assumed = |text: &str| format!("{text} assumed; transformers takes the weights' own");
        let without_dtype = |preset: &str, more: Value| {
            let mut config: Value = serde_json::from_str(preset).unwrap();
            let fields = config.as_object_mut().unwrap();
            fields.remove("dtype").unwrap();
            fields.extend(more.as_object().unwrap().clone());
            model_of(config).unwrap()
        };
        let gpt_oss = include_str!("presets/gpt-oss-20b.json");
        let published = model_of(serde_json::from_str(gpt_oss).unwrap()).unwrap();
        let quantized = json!({"quantization_config": {"quant_method": "mxfp4"}});
        for more in [quantized.clone(), json!({})] {
            let model = without_dtype(gpt_oss, more);
            assert_eq!(model.shape, published.shape);
            assert!(model.described().ends_with(&assumed(" active, bfloat16")), "{model:?}");
        }
        assert!(published.described().ends_with(" active"), "{published:?}");
        let llama = include_str!("presets/llama3-8b.json");
        let other_quantized = json!({"quantization_config": {"quant_method": 4}});
        let not_quantized = json!({"quantization_config": null});
        for (more, bytes, dtype) in [
            (quantized, 2, "bfloat16"),
            (other_quantized, 4, "float32"),
            (not_quantized, 4, "float32"),
        ] {
            let model = without_dtype(llama, more);
            let wanted = assumed(&format!("f, 8.03 B parameters, {dtype}"));
            assert_eq!((model.shape.dtype_bytes, model.described()), (bytes, wanted));
        }
    }

    /// Some layers have experts, others do not: figures of a layer are the mean.
    #[test]
    fn experts_count_as_often_as_a_token_meets_them() {
        let mut config = small("qwen2_moe");
        let more = json!({
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
            "shared_expert_intermediate_size": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let model = model_of(config).unwrap();
        // Layers 1 and 5: every second one, without the third.
        let (dense, sparse) = (5 * 3 * 10 * 30, 2 * (2 * 3 * 10 * 5 + 3 * 10 * 7 + 60 + 10));
        let attention = 2 * 10 * 12 + 2 * 10 * 6;
        let linear = 7 * attention + dense + sparse;
        assert_eq!(model.shape.layer_linear_weights, (linear as u64).div_ceil(7));
        let saved = 7 * (160 + 2 * (20 + 4 * 18))
            + 2 * 4 * (5 * 30 + 2 * (2 * 5 + 7))
            + 2 * 2 * 10 * (2 * 2)
            + 8 * 2 * 6;
        assert_eq!(model.shape.saved_bytes_per_token_layer, (saved as u64).div_ceil(7));
        let counted = model.parameters.unwrap();
        assert_eq!(counted.all - counted.active, 2 * 4 * 3 * 10 * 5);
        assert_eq!(counted.active, linear as u64 + 7 * (24 + 20) + 10 + 2000);
    }

    /// transformers 5 writes `num_local_experts` for `qwen3_moe`.
    #[test]
    fn the_number_of_experts_has_two_names() {
        let of = |name: &str| {
            let mut config = small("qwen3_moe");
            let more = json!({name: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            model_of(config).unwrap()
        };
        assert_eq!(of("num_local_experts"), of("num_experts"));
    }

    /// Keys and values of latent attention have the bytes and products of the heads in the shape.
    #[test]
    fn latent_attention_fits_a_shape() {
        let mut config = small("deepseek_v3");
        let more = json!({
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 8,
            "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "v_head_dim": 3,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let shape = model_of(config.clone()).unwrap().shape;
        let [heads, kv_heads, head_dim] = [shape.heads, shape.kv_heads, shape.head_dim];
        assert_eq!(2 * kv_heads * head_dim, 4 * (5 + 2) + 4 * 3, "keys and values");
        assert_eq!(2 * heads * head_dim, 4 * (5 + 2) + 4 * 3, "products of a pair");
        assert_eq!(shape.kv_linear_weights, 10 * (6 + 2) + 6 * 4 * (5 + 3));
        let queries = 10 * 8 + 8 * 4 * 7;
        assert_eq!(shape.last_layer_prefix_weights, shape.kv_linear_weights + queries / 3);
        let attention = queries + shape.kv_linear_weights + 4 * 3 * 10;
        let mlps = 3 * 3 * 10 * 30 + 4 * (2 * 3 * 10 * 5 + 3 * 10 * 5 + 40);
        assert_eq!(shape.layer_linear_weights, (7 * attention + mlps).div_ceil(7));
        config["v_head_dim"] = 4.into();
        let refused = model_of(config).unwrap_err().to_string();
        assert!(refused.ends_with("is 11; accepted: an even number"), "{refused}");
    }

    #[test]
    fn impossible_experts_are_refused() {
        let mut config = small("mixtral");
        for (field, seen, words) in [
            ("num_local_experts", json!(0), "num_local_experts is 0; accepted: 1 to 65536"),
            ("num_local_experts", json!(8), "num_experts_per_tok is missing; accepted: 1 to 8"),
            ("num_experts_per_tok", json!(9), "num_experts_per_tok is 9; accepted: 1 to 8"),
            ("num_experts_per_tok", json!("2"), "is \"2\"; accepted: a whole number, 1 or more"),
        ] {
            config[field] = seen;
            let refused = model_of(config.clone()).unwrap_err().to_string();
            assert!(refused.ends_with(words), "{refused}");
        }
        // Sizes whose product leaves 64 bits.
        let most = json!(1 << 24);
        for field in ["hidden_size", "intermediate_size"] {
            config[field] = most.clone();
        }
        config["num_local_experts"] = (1 << 16).into();
        config["num_experts_per_tok"] = (1 << 16).into();
        config["num_hidden_layers"] = LAYERS_MAX.into();
        let refused = model_of(config).unwrap_err().to_string();
        assert!(refused.contains("the number of parameters is too large"), "{refused}");
    }
}
