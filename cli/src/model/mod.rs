//! Models by name, Hugging Face `config.json`, or shape.

mod attention;
mod config;
mod mlp;
mod weights;

use std::path::Path;

use dormouse_schedule::ModelShape;
use serde::{Deserialize, Serialize};

use crate::files::{DescriptionError, fields, object, parsed};
use crate::sequences::VOCAB_MAX;
use crate::text::parameters;

/// A model: its name, its shape, and its vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The name or path as given.
    pub name: String,
    /// Vocabulary size.
    pub vocab: u32,
    /// The shape that costs depend on.
    pub shape: ModelShape,
    /// Its parameters; `None` for a file of a shape.
    #[serde(default)]
    pub parameters: Option<Parameters>,
    /// The type of elements that is assumed; `None` if the file says it, or the weights beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assumed_dtype: Option<String>,
}

/// Numbers of parameters, with embeddings, norms and biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// All.
    pub all: u64,
    /// Those that one token uses: without the experts that it is not routed to.
    pub active: u64,
}

/// A shape file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct ShapeFile {
    vocab: u32,
    #[serde(flatten)]
    shape: ModelShape,
}

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        /// Models known by name, with the fields that are read of their authors' `config.json`.
        const PRESETS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("presets/", $name, ".json")))),*];
    };
}

presets![
    "smollm2-135m",
    "llama3-8b",
    "llama3-70b",
    "qwen2.5-7b",
    "qwen3-8b",
    "mixtral-8x7b",
    "qwen1.5-moe-a2.7b",
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
];

/// Returns the names of the models known by name.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

impl Model {
    /// Finds a model by name or file: a `config.json`, or the fields of a shape and `vocab`.
    ///
    /// # Errors
    /// See [`DescriptionError`].
    pub fn find(path: &Path) -> Result<Self, DescriptionError> {
        let name = path.display().to_string();
        let otherwise = format!("{}, or a file", names().collect::<Vec<_>>().join(", "));
        let preset = PRESETS.iter().find(|(known, _)| name == *known);
        let object = match preset {
            Some((_, text)) => parsed(&name, text.as_bytes(), &otherwise)?,
            None => object(path, &otherwise)?,
        };
        if object.contains_key("hidden_size") || object.contains_key("model_type") {
            let folder = path.parent().filter(|_| preset.is_none());
            return config::model(name, object, folder);
        }
        let file = fields(path, object, &ShapeFile::default())?;
        if !(1..=VOCAB_MAX).contains(&file.vocab) {
            return Err(refuse(&name, "vocab", file.vocab, format!("1 to {VOCAB_MAX}")));
        }
        let (vocab, shape) = (file.vocab, file.shape);
        Ok(Self { name, vocab, shape, parameters: None, assumed_dtype: None })
    }

    /// Returns the bytes of all weights; of a shape file those it counts, without embeddings.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let ModelShape { layers, layer_linear_weights, head_weights, dtype_bytes, .. } = self.shape;
        let counted =
            layer_linear_weights.saturating_mul(layers.into()).saturating_add(head_weights);
        let weights = self.parameters.map_or(counted, |parameters| parameters.all);
        weights.saturating_mul(dtype_bytes.into())
    }

    /// Returns the name with the number of parameters, and the type of elements if it is assumed.
    pub(crate) fn described(&self) -> String {
        let counted = match self.parameters {
            None => self.name.clone(),
            Some(Parameters { all, active }) if all == active => {
                format!("{}, {} parameters", self.name, parameters(all))
            }
            Some(Parameters { all, active }) => {
                let (all, active) = (parameters(all), parameters(active));
                format!("{}, {all} parameters, {active} of them active", self.name)
            }
        };
        match &self.assumed_dtype {
            None => counted,
            Some(dtype) => {
                format!("{counted}, {dtype} assumed; transformers takes the weights' own")
            }
        }
    }
}

fn refuse(
    file: &str,
    what: &str,
    seen: impl std::fmt::Display,
    accepted: impl Into<String>,
) -> DescriptionError {
    let (file, what, accepted) = (file.to_owned(), what.to_owned(), accepted.into());
    DescriptionError::Value { file, what, seen: seen.to_string(), accepted }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as the published weights have them, and active ones in billions as their authors state
    /// them, rounded or cut off. The authors of two leave the input embedding out.
    #[test]
    fn presets_have_the_published_parameter_counts() {
        let published: &[(&str, u64, &str)] = &[
            ("smollm2-135m", 134_515_008, "0.135"),
            ("llama3-8b", 8_030_261_248, "8.03"),
            ("llama3-70b", 70_553_706_496, "70.6"),
            ("qwen2.5-7b", 7_615_616_512, "7.61"),
            ("qwen3-8b", 8_190_735_360, "8.2"),
            ("mixtral-8x7b", 46_702_792_704, "12.9"),
            ("qwen1.5-moe-a2.7b", 14_315_784_192, "2.7"),
            ("qwen3-30b-a3b", 30_532_122_624, "3.3"),
            ("olmoe-1b-7b", 6_919_161_856, "1.3"),
            ("gpt-oss-20b", 20_914_757_184, "3.6"),
            ("gpt-oss-120b", 116_829_156_672, "5.1"),
            ("deepseek-v2-lite", 15_706_484_224, "2.4"),
            ("deepseek-v2", 235_741_434_880, "21"),
            ("deepseek-v3", 671_026_419_200, "37"),
        ];
        assert_eq!(published.len(), PRESETS.len(), "each is checked");
        for (name, all, active) in published {
            let model = Model::find(Path::new(name)).unwrap();
            let counted = model.parameters.unwrap();
            assert_eq!(counted.all, *all, "{name}");
            let left_out = name.starts_with("gpt-oss") || *name == "deepseek-v2-lite";
            let embedding = if left_out { model.shape.head_weights } else { 0 };
            let billions = (counted.active - embedding) as f64 / 1e9;
            let digits = active.split_once('.').map_or(0, |(_, digits)| digits.len());
            let unit = 10_f64.powi(-(digits as i32));
            let published: f64 = active.parse().unwrap();
            assert!((billions - published).abs() < unit, "{name}: {billions}");
        }
    }
}
