//! Models by name, Hugging Face `config.json`, or shape.
//!
//! # From a `config.json`
//! With hidden size h, intermediate size i, a heads, k key and value heads of d elements (`head_dim`,
//! default h / a), b bytes per element (`dtype` or `torch_dtype`, default float32):
//!
//! | field of a shape | value |
//! |---|---|
//! | `layer_linear_weights` | `2·h·a·d + 2·h·k·d + 3·h·i`: queries and output, K and V, a gated MLP |
//! | `kv_linear_weights` | `2·h·k·d` |
//! | `last_layer_prefix_weights` | `2·h·k·d + h·a·d / 3`: K and V both ways, queries forward only |
//! | `head_weights` | `h·vocab_size` |
//! | `saved_bytes_per_token_layer` | `16·h + b·(2·h + 4·(a + k)·d + 4·i)`: two norms in FP32, queries, K and V before and after rotary embedding, the MLP |
//!
//! The last two rows match PyTorch's eager modules, as the Python package counts them.

use std::borrow::Cow;
use std::path::Path;

use dormouse_schedule::{LAYERS_MAX, ModelShape};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::files::{DescriptionError, fields, object};
use crate::sequences::VOCAB_MAX;

/// Maximum dimension in a `config.json`: sums of products of two fit 64 bits.
const DIMENSION_MAX: u64 = 1 << 24;
/// Architectures that the formulas describe.
const TYPES: &[&str] = &["llama", "qwen2", "qwen3"];

/// Numeric fields of a `config.json`.
const NUMBERS: &[&str] = &[
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
];

/// A model: its name, its shape, and its vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The name or path as given.
    pub name: String,
    /// Vocabulary size.
    pub vocab: u32,
    /// The shape that costs depend on.
    pub shape: ModelShape,
}

/// A shape file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct ShapeFile {
    vocab: u32,
    #[serde(flatten)]
    shape: ModelShape,
}

/// The fields read from a `config.json`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    model_type: Cow<'static, str>,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: u64,
    #[serde(alias = "torch_dtype")]
    dtype: Option<Cow<'static, str>>,
    #[serde(default)]
    use_sliding_window: bool,
}

/// Models known by name, from their authors' `config.json`; all are in bfloat16.
const PRESETS: &[(&str, Config)] = &[
    ("smollm2-135m", preset("llama", 30, [576, 1_536, 9, 3, 64], 49_152)),
    ("llama3-8b", preset("llama", 32, [4_096, 14_336, 32, 8, 128], 128_256)),
    ("llama3-70b", preset("llama", 80, [8_192, 28_672, 64, 8, 128], 128_256)),
    ("qwen2.5-7b", preset("qwen2", 28, [3_584, 18_944, 28, 4, 128], 152_064)),
    ("qwen3-8b", preset("qwen3", 36, [4_096, 12_288, 32, 8, 128], 151_936)),
];

/// `sizes`: hidden, intermediate, attention heads, KV heads, elements per head.
const fn preset(model_type: &'static str, layers: u64, sizes: [u64; 5], vocab: u64) -> Config {
    Config {
        model_type: Cow::Borrowed(model_type),
        hidden_size: sizes[0],
        intermediate_size: sizes[1],
        num_hidden_layers: layers,
        num_attention_heads: sizes[2],
        num_key_value_heads: Some(sizes[3]),
        head_dim: Some(sizes[4]),
        vocab_size: vocab,
        dtype: Some(Cow::Borrowed("bfloat16")),
        use_sliding_window: false,
    }
}

/// Returns the names of the models known by name.
pub(crate) fn names() -> String {
    PRESETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

impl Model {
    /// Finds a model by name or file: a `config.json`, or the fields of a shape and `vocab`.
    ///
    /// # Errors
    /// See [`DescriptionError`].
    pub fn find(path: &Path) -> Result<Self, DescriptionError> {
        let name = path.display().to_string();
        if let Some((_, preset)) = PRESETS.iter().find(|(known, _)| name == *known) {
            return preset.model(name);
        }
        let otherwise = format!("{}, or a file", names());
        let object = object(path, &otherwise)?;
        if object.contains_key("hidden_size") || object.contains_key("model_type") {
            return config(&name, object)?.model(name);
        }
        let file = fields(path, object, &ShapeFile::default())?;
        if !(1..=VOCAB_MAX).contains(&file.vocab) {
            return Err(refuse(&name, "vocab", file.vocab, format!("1 to {VOCAB_MAX}")));
        }
        Ok(Self { name, vocab: file.vocab, shape: file.shape })
    }
}

fn config(file: &str, object: Map<String, Value>) -> Result<Config, DescriptionError> {
    let no_number = |value: &Value| !value.is_u64() && !value.is_null();
    for what in NUMBERS {
        if let Some(seen) = object.get(*what).filter(|value| no_number(value)) {
            return Err(refuse(file, what, seen, "a whole number, 1 or more".to_owned()));
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
    fn model(&self, name: String) -> Result<Model, DescriptionError> {
        if !TYPES.contains(&&*self.model_type) {
            let accepted = format!("{}; for others, a file with the shape", TYPES.join(", "));
            return Err(refuse(&name, "model_type", &self.model_type, accepted));
        }
        if self.use_sliding_window {
            return Err(refuse(&name, "use_sliding_window", true, "false".to_owned()));
        }
        let [layers, vocab] = [
            ("num_hidden_layers", self.num_hidden_layers, LAYERS_MAX),
            ("vocab_size", self.vocab_size, VOCAB_MAX),
        ]
        .map(|(what, seen, most)| {
            let number = u32::try_from(seen).ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| refuse(&name, what, seen, format!("1 to {most}")))
        });
        let dimension = |what, seen: u64| {
            if (1..=DIMENSION_MAX).contains(&seen) {
                return Ok(seen);
            }
            Err(refuse(&name, what, seen, format!("1 to {DIMENSION_MAX}")))
        };
        let hidden = dimension("hidden_size", self.hidden_size)?;
        let inner = dimension("intermediate_size", self.intermediate_size)?;
        let heads = dimension("num_attention_heads", self.num_attention_heads)?;
        let kv_heads = self.num_key_value_heads.unwrap_or(heads);
        let kv_heads = dimension("num_key_value_heads", kv_heads)?;
        let head_dim = dimension("head_dim", self.head_dim.unwrap_or(hidden / heads))?;
        let element = self.element_bytes(&name)?;
        let (layers, vocab) = (layers?, vocab?);
        let queries = dimension("num_attention_heads · head_dim", heads * head_dim)?;
        let keys = dimension("num_key_value_heads · head_dim", kv_heads * head_dim)?;
        let kv_linear_weights = 2 * hidden * keys;
        let shape = ModelShape {
            layers,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            dtype_bytes: element as u32,
            layer_linear_weights: 2 * hidden * queries + kv_linear_weights + 3 * hidden * inner,
            kv_linear_weights,
            last_layer_prefix_weights: kv_linear_weights + hidden * queries / 3,
            head_weights: hidden * u64::from(vocab),
            saved_bytes_per_token_layer: 16 * hidden
                + element * (2 * hidden + 4 * (queries + keys) + 4 * inner),
        };
        Ok(Model { name, vocab, shape })
    }

    fn element_bytes(&self, name: &str) -> Result<u64, DescriptionError> {
        match self.dtype.as_deref() {
            Some("bfloat16" | "float16") => Ok(2),
            Some("float32") | None => Ok(4),
            Some("float64") => Ok(8),
            Some(other) => {
                let accepted = "bfloat16, float16, float32, float64".to_owned();
                Err(refuse(name, "dtype", other, accepted))
            }
        }
    }
}

fn refuse(
    file: &str,
    what: &str,
    seen: impl std::fmt::Display,
    accepted: String,
) -> DescriptionError {
    let (file, what) = (file.to_owned(), what.to_owned());
    DescriptionError::Value { file, what, seen: seen.to_string(), accepted }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as their authors publish them. What a shape does not count is added by hand:
    /// norms, biases, and the embedding where the head has weights of its own.
    #[test]
    fn presets_have_the_published_parameter_counts() {
        for (name, tied, layer_extras, published) in [
            ("smollm2-135m", true, 2 * 576, 134_515_008_u64),
            ("llama3-8b", false, 2 * 4_096, 8_030_261_248),
            ("llama3-70b", false, 2 * 8_192, 70_553_706_496),
            // Biases of queries, keys and values.
            ("qwen2.5-7b", false, 2 * 3_584 + (28 + 4 + 4) * 128, 7_615_616_512),
            // Norms of queries and keys.
            ("qwen3-8b", false, 2 * 4_096 + 2 * 128, 8_190_735_360),
        ] {
            let model = Model::find(Path::new(name)).unwrap();
            let preset = PRESETS.iter().find(|(known, _)| *known == name).unwrap();
            let ModelShape { layers, layer_linear_weights, head_weights, .. } = model.shape;
            let embedding = if tied { 0 } else { head_weights };
            let layer = layer_linear_weights + layer_extras;
            let all = u64::from(layers) * layer + head_weights + embedding + preset.1.hidden_size;
            assert_eq!(all, published, "{name}");
        }
        assert_eq!(PRESETS.len(), 5, "each is checked");
    }

    #[test]
    fn a_shape_follows_the_formulas() {
        let config = Config {
            model_type: "llama".into(),
            hidden_size: 10,
            intermediate_size: 30,
            num_hidden_layers: 7,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            head_dim: Some(3),
            vocab_size: 100,
            dtype: Some("bfloat16".into()),
            use_sliding_window: false,
        };
        let model = config.model(String::new()).unwrap();
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
        let plain = Config {
            num_key_value_heads: None,
            head_dim: None,
            dtype: None,
            hidden_size: 12,
            ..config
        };
        let shape = plain.model(String::new()).unwrap().shape;
        assert_eq!((shape.kv_heads, shape.head_dim, shape.dtype_bytes), (4, 3, 4));
    }
}
