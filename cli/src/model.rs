//! Models by name, by a Hugging Face `config.json`, or by their shape.
//!
//! # From a `config.json`
//! Of hidden size h, intermediate size i, heads a, key and value heads k of d elements (`head_dim`,
//! or h / a), b bytes an element (`dtype` or `torch_dtype`; float32 where neither is there):
//!
//! | field of a shape | what is put there |
//! |---|---|
//! | `layer_linear_weights` | `2·h·a·d + 2·h·k·d + 3·h·i`: queries and output, K and V, a gated MLP |
//! | `kv_linear_weights` | `2·h·k·d` |
//! | `last_layer_prefix_weights` | `2·h·k·d + h·a·d / 3`: K and V both ways, queries forward only |
//! | `head_weights` | `h·vocab_size` |
//! | `saved_bytes_per_token_layer` | `16·h + b·(2·h + 4·(a + k)·d + 4·i)`: two norms in FP32, queries, K and V before and after rotary embedding, the MLP |
//!
//! The last two rows are what PyTorch's eager modules do, as the Python package counts them.

use std::path::Path;

use dormouse_schedule::{LAYERS_MAX, ModelShape};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::files::{DescriptionError, fields, object};
use crate::sequences::VOCAB_MAX;

/// Largest size of one dimension in a `config.json`: products of two, a few times, fit 64 bits.
const DIMENSION_MAX: u64 = 1 << 24;
/// Architectures whose layers are what the formulas count.
const TYPES: &[&str] = &["llama", "qwen2", "qwen3"];

/// Fields of a `config.json` that are numbers.
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

/// A file of a shape: its fields, and the vocabulary.
#[derive(Debug, Default, Serialize, Deserialize)]
struct ShapeFile {
    vocab: u32,
    #[serde(flatten)]
    shape: ModelShape,
}

/// The fields read from a `config.json`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    model_type: String,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: u64,
    #[serde(alias = "torch_dtype")]
    dtype: Option<String>,
    #[serde(default)]
    use_sliding_window: bool,
}

/// A model known by name.
struct Preset {
    name: &'static str,
    model_type: &'static str,
    layers: u64,
    hidden: u64,
    intermediate: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    vocab: u64,
}

/// As their authors' `config.json` have them, all in bfloat16.
#[rustfmt::skip]
const PRESETS: &[Preset] = &[
    Preset { name: "smollm2-135m", model_type: "llama", layers: 30, hidden: 576, intermediate: 1_536, heads: 9, kv_heads: 3, head_dim: 64, vocab: 49_152 },
    Preset { name: "llama3-8b", model_type: "llama", layers: 32, hidden: 4_096, intermediate: 14_336, heads: 32, kv_heads: 8, head_dim: 128, vocab: 128_256 },
    Preset { name: "llama3-70b", model_type: "llama", layers: 80, hidden: 8_192, intermediate: 28_672, heads: 64, kv_heads: 8, head_dim: 128, vocab: 128_256 },
    Preset { name: "qwen2.5-7b", model_type: "qwen2", layers: 28, hidden: 3_584, intermediate: 18_944, heads: 28, kv_heads: 4, head_dim: 128, vocab: 152_064 },
    Preset { name: "qwen3-8b", model_type: "qwen3", layers: 36, hidden: 4_096, intermediate: 12_288, heads: 32, kv_heads: 8, head_dim: 128, vocab: 151_936 },
];

/// The names of the models known by one.
pub(crate) fn names() -> String {
    PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ")
}

impl Model {
    /// The model of a name, or of a file: a `config.json`, or the fields of a shape and `vocab`.
    ///
    /// # Errors
    /// See [`DescriptionError`].
    pub fn find(path: &Path) -> Result<Self, DescriptionError> {
        let name = path.display().to_string();
        if let Some(preset) = PRESETS.iter().find(|preset| name == preset.name) {
            return preset.config().model(name);
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

impl Preset {
    fn config(&self) -> Config {
        Config {
            model_type: self.model_type.to_owned(),
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: Some(self.kv_heads),
            head_dim: Some(self.head_dim),
            vocab_size: self.vocab,
            dtype: Some("bfloat16".to_owned()),
            use_sliding_window: false,
        }
    }
}

fn config(file: &str, object: Map<String, Value>) -> Result<Config, DescriptionError> {
    let no_number = |value: &Value| !value.is_u64() && !value.is_null();
    for what in NUMBERS {
        if let Some(seen) = object.get(*what).filter(|value| no_number(value)) {
            return Err(refuse(file, what, seen, "a whole number, 1 or more".to_owned()));
        }
    }
    // What is read of it; a config has many more fields.
    serde_json::from_value(Value::Object(object)).map_err(|source| DescriptionError::Json {
        file: file.to_owned(),
        source,
        accepted: "a config.json of Hugging Face".to_owned(),
    })
}

impl Config {
    fn model(&self, name: String) -> Result<Model, DescriptionError> {
        if !TYPES.contains(&self.model_type.as_str()) {
            let accepted = format!("{}; of others give the shape", TYPES.join(", "));
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
    fn models_known_by_name_have_as_many_parameters_as_published() {
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
            let preset = PRESETS.iter().find(|preset| preset.name == name).unwrap();
            let ModelShape { layers, layer_linear_weights, head_weights, .. } = model.shape;
            let embedding = if tied { 0 } else { head_weights };
            let layer = layer_linear_weights + layer_extras;
            let all = u64::from(layers) * layer + head_weights + embedding + preset.hidden;
            assert_eq!(all, published, "{name}");
        }
        assert_eq!(PRESETS.len(), 5, "each is checked");
    }

    #[test]
    fn a_shape_is_what_the_module_says() {
        let config = Config {
            model_type: "llama".to_owned(),
            hidden_size: 10,
            intermediate_size: 30,
            num_hidden_layers: 7,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            head_dim: Some(3),
            vocab_size: 100,
            dtype: Some("bfloat16".to_owned()),
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
