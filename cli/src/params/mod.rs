//! `dormouse params`: the effective configuration, each value with its source.

mod page;

use std::fmt::Write as _;
use std::path::Path;

use dormouse_parallel::draw::bytes;

use crate::args::ParamsArgs;
use crate::library::{self, Param};
use crate::text::as_json;
use crate::{Error, Output};

/// Prints all parameters, or one at length.
pub(crate) fn run(args: &ParamsArgs) -> Result<Output, Error> {
    let file = library::find(args.lib.as_deref())?;
    if args.file {
        return Ok(Output::of(library::configuration(&file)?));
    }
    let params = library::params(&file)?;
    let Some(name) = &args.name else {
        return Ok(Output::of(if args.json { as_json(&params)? } else { table(&params, &file) }));
    };
    let Some(param) = params.iter().find(|param| is_named(param, name)) else {
        let names: Vec<&str> = params.iter().map(|param| param.name.as_str()).collect();
        return Err(Error::Param { seen: name.clone(), accepted: accepted(name, &names) });
    };
    Ok(Output::of(if args.json { as_json(param)? } else { explanation(param) }))
}

/// Whether `name` is that of a parameter: in either case, with or without the prefix.
fn is_named(param: &Param, name: &str) -> bool {
    let short = param.name.strip_prefix(PREFIX).unwrap_or(&param.name);
    [short, &param.name].iter().any(|known| known.eq_ignore_ascii_case(name))
}

const PREFIX: &str = "DORMOUSE_";

/// Names with a part of the unknown one, or that all names are shown elsewhere.
fn accepted(name: &str, names: &[&str]) -> String {
    let name = name.to_ascii_uppercase();
    let parts: Vec<&str> =
        name.split('_').filter(|part| part.len() > 2 && *part != "DORMOUSE").collect();
    let shared = |known: &&&str| parts.iter().filter(|part| known.contains(**part)).count();
    let best = names.iter().map(|known| shared(&known)).max().filter(|best| *best > 0);
    let near: Vec<&str> = match best {
        Some(best) => names.iter().filter(|known| shared(known) == best).copied().collect(),
        None => Vec::new(),
    };
    match near.is_empty() {
        true => "the names that `dormouse params` lists".to_owned(),
        false => near.join(", "),
    }
}

fn or_not_set(text: &str) -> &str {
    if text.is_empty() { "not set" } else { text }
}

/// The value for a reader: a size also with its unit.
fn shown(param: &Param) -> String {
    match (param.kind.as_str(), param.value.parse()) {
        ("size", Ok(size)) if size >= 1 << 10 => format!("{size} ({})", bytes(size)),
        _ => or_not_set(&param.value).to_owned(),
    }
}

fn table(params: &[Param], file: &Path) -> String {
    let width = params.iter().map(|param| param.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for param in params {
        // Writing to a String never fails.
        let _ = writeln!(text, "{:width$}  {}  [{}]", param.name, shown(param), param.origin());
    }
    let _ = writeln!(text, "\nread from {}", file.display());
    text.push_str("next: dormouse params NAME explains one; dormouse params --file writes a file for DORMOUSE_CONFIG\n");
    text
}

fn explanation(param: &Param) -> String {
    let mut text = format!("{} = {}  [{}]\n", param.name, shown(param), param.origin());
    let _ = writeln!(text, "{}\n", param.help);
    let _ = writeln!(text, "kind      {}", param.kind);
    let _ = writeln!(text, "built in  {}", or_not_set(&param.built_in));
    let _ = writeln!(text, "accepted  {}", param.accepts);
    if let Some(page) = page::of(&param.name) {
        let _ = writeln!(
            text,
            "in a file {}\n\n{}",
            if page.is_in_file { "yes" } else { "no" },
            page.detail
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_suggested() {
        let names =
            ["DORMOUSE_NVME_DIR", "DORMOUSE_NVME_FILE_BYTES", "DORMOUSE_LOG", "DORMOUSE_LOG_FILE"];
        assert_eq!(
            accepted("nvme_directory", &names),
            "DORMOUSE_NVME_DIR, DORMOUSE_NVME_FILE_BYTES"
        );
        assert_eq!(accepted("DORMOUSE_LOG_LEVEL", &names), "DORMOUSE_LOG, DORMOUSE_LOG_FILE");
        assert_eq!(accepted("teapot", &names), "the names that `dormouse params` lists");
    }
}
