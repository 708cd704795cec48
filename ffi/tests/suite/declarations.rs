//! Functions as the header declares and documents them.

use std::collections::BTreeMap;

use crate::common::root;

/// Handles of the header, in the order of `tests/c/race.h` and `tests/c/wrong.h`.
pub(crate) const KINDS: &[&str] =
    &["runtime", "tag", "forest", "plan", "prefix", "history", "dialogue"];

/// A function of the header.
pub(crate) struct Function {
    pub(crate) name: String,
    /// Type and name of each argument.
    pub(crate) arguments: Vec<(String, String)>,
    pub(crate) doc: String,
    pub(crate) has_status: bool,
}

/// Reads the functions of the header.
pub(crate) fn functions() -> Vec<Function> {
    let text = std::fs::read_to_string(root().join("ffi/include/dormouse.h")).unwrap();
    let (mut functions, mut doc, mut code) = (Vec::new(), String::new(), String::new());
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("///") {
            doc.push_str(comment);
            continue;
        }
        code.push_str(line.trim());
        code.push(' ');
        if !line.ends_with(';') && !line.is_empty() {
            continue;
        }
        let (code, doc) = (std::mem::take(&mut code), std::mem::take(&mut doc));
        let Some((head, rest)) = code.split_once('(') else { continue };
        let name = head.rsplit([' ', '*']).next().unwrap();
        if !name.starts_with("dormouse_") || head.contains(['{', '#']) {
            continue;
        }
        let rest = rest.rsplit_once(')').unwrap().0;
        let arguments = rest.split(',').map(str::trim).filter(|argument| *argument != "void");
        let argument = |text: &str| {
            let at = text.rfind([' ', '*']).unwrap() + 1;
            (text[..at].trim().to_owned(), text[at..].to_owned())
        };
        functions.push(Function {
            name: name.to_owned(),
            arguments: arguments.map(argument).collect(),
            doc,
            has_status: head.starts_with("dormouse_status_t "),
        });
    }
    functions
}

impl Function {
    /// Returns the kind of a handle that the argument passes (`*`) or receives (`**`).
    pub(crate) fn kind(of: &str, stars: &str) -> Option<usize> {
        KINDS.iter().position(|kind| of == format!("struct dormouse_{kind}_t {stars}"))
    }

    /// Returns the documented errors, with those of the functions that the sentence names.
    pub(crate) fn errors(&self, all: &BTreeMap<String, &Self>) -> Vec<String> {
        let (_, sentence) = self.doc.split_once("Errors:").expect(&self.name);
        let mut errors: Vec<String> = Vec::new();
        for word in sentence.split('`').skip(1).step_by(2) {
            let capital = |letter: char| letter.is_ascii_uppercase() || letter == '_';
            let is_status = word.chars().all(capital) && !word.starts_with("DORMOUSE_");
            // No race is an internal error.
            if is_status && word != "PANIC" {
                errors.push(word.to_owned());
            } else if let Some(other) = all.get(word)
                && sentence.contains(&format!("those of `{word}`"))
            {
                errors.extend(other.errors(all));
            }
        }
        errors.sort();
        errors.dedup();
        errors
    }
}
