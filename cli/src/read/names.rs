//! Names of fields and columns.

use crate::Refusal;

/// Names of the fields of JSON lines and of the columns of tables; `None` selects the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Token ids; default `input_ids`, or `ids` in JSON lines.
    pub ids: Option<String>,
    /// Ids of a prompt, if they are apart from those of its response; default `prompt_ids`.
    pub prompt: Option<String>,
    /// Ids of the response; default `response_ids`.
    pub response: Option<String>,
    /// 1 for each token that carries loss, else 0; none by default.
    pub loss_mask: Option<String>,
    /// The user's name of a sequence; none by default.
    pub id: Option<String>,
}

/// Default name of token ids in tables.
const IDS: &str = "input_ids";
/// Other default name of token ids in JSON lines, also of the field in refusals of values.
const IDS_OF_LINES: &str = "ids";
const PROMPT: &str = "prompt_ids";
const RESPONSE: &str = "response_ids";

impl Names {
    /// Returns whether a field of JSON lines has token ids.
    pub(super) fn is_ids(&self, field: &str) -> bool {
        match &self.ids {
            Some(name) => field == name,
            None => [IDS, IDS_OF_LINES].contains(&field),
        }
    }

    /// Returns the column of token ids.
    pub(super) fn ids(&self) -> &str {
        self.ids.as_deref().unwrap_or(IDS)
    }

    pub(super) fn prompt(&self) -> &str {
        self.prompt.as_deref().unwrap_or(PROMPT)
    }

    pub(super) fn response(&self) -> &str {
        self.response.as_deref().unwrap_or(RESPONSE)
    }

    /// Returns a refusal that names the field or column as the file does. `ids`: the name of token ids there.
    pub(super) fn in_file(&self, refusal: Refusal, ids: &str) -> Refusal {
        let loss_mask = self.loss_mask.as_deref().unwrap_or_default();
        let id = self.id.as_deref().unwrap_or_default();
        let named = [
            (PROMPT, self.prompt()),
            (RESPONSE, self.response()),
            ("loss_mask", loss_mask),
            (IDS_OF_LINES, ids),
            ("id", id),
        ];
        let renamed = named.into_iter().find_map(|(field, name)| {
            let index = refusal.field.strip_prefix(field)?;
            (index.is_empty() || index.starts_with('[')).then(|| format!("{name}{index}"))
        });
        match renamed {
            Some(field) => Refusal { field, ..refusal },
            None => refusal,
        }
    }
}
