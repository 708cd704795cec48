//! The fields of a request.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{QUERY_VERSION, QueryError, Trees};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Plan, PlanError, PlanOptions, Scoring};

/// The fields of a request by name; each occurs once.
pub(super) struct Fields<'a>(pub(super) BTreeMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Request;
        impl<'de> Visitor<'de> for Request {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                    if fields.contains_key(&name) {
                        return Err(A::Error::custom(format!("duplicate field `{name}`")));
                    }
                    fields.insert(name, value);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Request)
    }
}

impl Fields<'_> {
    /// Parses a required field. Unknown fields within it are refused.
    pub(super) fn get<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, QueryError> {
        let text = self.0.get(name).ok_or_else(|| serde_json::Error::missing_field(name))?;
        let mut unknown = None;
        let mut parser = serde_json::Deserializer::from_str(text.get());
        let value = serde_ignored::deserialize(&mut parser, |path| {
            unknown.get_or_insert_with(|| format!("{name}.{path}"));
        })
        .map_err(|error| serde_json::Error::custom(format!("field {name}: {error}")))?;
        unknown.map_or(Ok(value), |path| Err(QueryError::Field { path }))
    }

    /// Parses an optional field.
    pub(super) fn get_or<T: DeserializeOwned>(
        &self,
        name: &'static str,
        default: T,
    ) -> Result<T, QueryError> {
        if self.0.contains_key(name) { self.get(name) } else { Ok(default) }
    }

    /// Parses the field `forest`.
    pub(super) fn forest(&self) -> Result<Forest, QueryError> {
        Ok(Forest::try_from(self.get::<Trees>("forest")?)?)
    }
}

/// A plan to make, as a field of a request.
#[derive(Deserialize)]
pub(super) struct PlanRequest {
    forest: Trees,
    scoring: Vec<Scoring>,
    options: PlanOptions,
}

impl PlanRequest {
    pub(super) fn plan(self) -> Result<Plan, PlanError> {
        Plan::new(&Forest::try_from(self.forest)?, &self.scoring, &self.options)
    }
}

/// Returns the reply with an answer.
pub(super) fn reply(answer: impl Serialize) -> Result<String, QueryError> {
    #[derive(Serialize)]
    struct Reply<A> {
        version: u32,
        answer: A,
    }
    Ok(serde_json::to_string(&Reply { version: QUERY_VERSION, answer })?)
}
