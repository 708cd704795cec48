//! The type of the weights beside a `config.json`, from the header of their `.safetensors`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::refuse;
use crate::DescriptionError;

/// Names under which transformers looks for weights, in its order.
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of a header or an index in bytes; DeepSeek-V3's index has 9 MB.
const HEADER_BYTES_MAX: u64 = 1 << 25;
/// What a refusal accepts besides: the weights are not read then.
const OTHERWISE: &str = ", or a dtype in the config.json";
/// The entry of a header that is no tensor.
const METADATA: &str = "__metadata__";

/// A header, by the names of tensors: transformers takes them in this order.
type Header = BTreeMap<String, Tensor>;

#[derive(Debug, Deserialize)]
struct Tensor {
    dtype: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Returns the type as which transformers loads the weights in `folder` if no configuration says it: that of the first
/// tensor of a floating type, of the first shard. `None` without weights or without such a tensor.
pub(super) fn dtype(folder: &Path) -> Result<Option<&'static str>, DescriptionError> {
    let header = match header(folder, WEIGHTS)? {
        Some(header) => header,
        None => {
            let Some(shard) = first_shard(folder)? else { return Ok(None) };
            let Some(header) = header(folder, &shard)? else { return Ok(None) };
            header
        }
    };
    let tensors = header.iter().filter(|(name, _)| *name != METADATA);
    Ok(tensors.filter_map(|(_, tensor)| floating(tensor.dtype.as_deref()?)).next())
}

/// Returns the name in a configuration of a header's type, if transformers takes it for a whole model.
fn floating(dtype: &str) -> Option<&'static str> {
    match dtype {
        "BF16" => Some("bfloat16"),
        "F16" => Some("float16"),
        "F32" => Some("float32"),
        "F64" => Some("float64"),
        _ => None,
    }
}

/// Returns the name of the first shard that an index in `folder` lists; `None` without an index.
fn first_shard(folder: &Path) -> Result<Option<String>, DescriptionError> {
    let path = folder.join(INDEX);
    let Some(mut file) = opened(&path)? else { return Ok(None) };
    // A special file has no size and may have no end.
    let text = read_up_to(&mut file, HEADER_BYTES_MAX + 1).map_err(|source| io(&path, source))?;
    check_length(&path, "its length", text.len() as u64)?;
    let index: Index = parsed(&path, &text, "an index with a weight_map")?;
    Ok(index.weight_map.into_values().min())
}

/// Returns the header of a `.safetensors` file in `folder`; `None` without the file.
fn header(folder: &Path, name: &str) -> Result<Option<Header>, DescriptionError> {
    let path = folder.join(name);
    let Some(mut file) = opened(&path)? else { return Ok(None) };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|source| io(&path, source))?;
    let length = u64::from_le_bytes(length);
    check_length(&path, "the length of its header", length)?;
    let text = read_up_to(&mut file, length).map_err(|source| io(&path, source))?;
    parsed(&path, &text, "the header of a .safetensors file").map(Some)
}

/// Opens a file; `None` if there is none.
fn opened(path: &Path) -> Result<Option<File>, DescriptionError> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io(path, error)),
    }
}

/// Reads as many bytes as there are, at most `bytes_max`.
fn read_up_to(file: &mut File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn check_length(path: &Path, what: &str, bytes: u64) -> Result<(), DescriptionError> {
    if bytes <= HEADER_BYTES_MAX {
        return Ok(());
    }
    let accepted = format!("at most {HEADER_BYTES_MAX} bytes{OTHERWISE}");
    Err(refuse(&path.display().to_string(), what, bytes, accepted))
}

fn parsed<T: DeserializeOwned>(
    path: &Path,
    text: &[u8],
    accepted: &str,
) -> Result<T, DescriptionError> {
    serde_json::from_slice(text).map_err(|source| DescriptionError::Json {
        file: path.display().to_string(),
        source,
        accepted: format!("{accepted}{OTHERWISE}"),
    })
}

fn io(path: &Path, source: io::Error) -> DescriptionError {
    let accepted = format!("accepted: the weights of the config.json{OTHERWISE}");
    DescriptionError::Io { file: path.display().to_string(), source, accepted }
}
