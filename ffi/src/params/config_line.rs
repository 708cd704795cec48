//! Lines of a configuration file.
//!
//! ```text
//!   NAME = VALUE        # comment
//!   NAME = "VALUE"      # with # and \\" and \\\\ and \\n and \\r in it
//! ```

use std::borrow::Cow;

/// Reads a line. `None`: no name. The error is what is accepted.
pub(super) fn parse(line: &str) -> Result<Option<(&str, Cow<'_, str>)>, &'static str> {
    let end = line.find(['=', '#']).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let name = name.trim();
    match rest.strip_prefix('=') {
        Some(_) if name.is_empty() => Err("NAME = VALUE"),
        Some(value) => Ok(Some((name, value_of(value.trim())?))),
        None if name.is_empty() => Ok(None),
        None => Err("NAME = VALUE"),
    }
}

fn value_of(text: &str) -> Result<Cow<'_, str>, &'static str> {
    let Some(quoted) = text.strip_prefix('"') else {
        return Ok(text.split('#').next().unwrap_or("").trim_end().into());
    };
    let mut value = String::with_capacity(quoted.len());
    let mut letters = quoted.chars();
    loop {
        match letters.next() {
            Some('"') => break,
            Some('\\') => value.push(match letters.next() {
                Some('n') => '\n',
                Some('r') => '\r',
                Some(letter @ ('"' | '\\')) => letter,
                _ => return Err(r#"\", \\, \n or \r after a backslash in quotes"#),
            }),
            Some(letter) => value.push(letter),
            None => return Err("a closing quote"),
        }
    }
    let rest = letters.as_str().trim_start();
    if rest.is_empty() || rest.starts_with('#') {
        return Ok(value.into());
    }
    Err("a comment or nothing after the closing quote")
}

/// Formats a value so that [`parse`] returns it. Plain unless it must be quoted.
pub(super) fn format_value(value: &str) -> Cow<'_, str> {
    if !value.contains(['#', '\n', '\r']) && !value.starts_with('"') {
        return value.into();
    }
    let mut quoted = String::from("\"");
    for letter in value.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_names_and_values_with_comments() {
        for (line, name, value) in [
            ("A = b", "A", "b"),
            ("  A=b # why", "A", "b"),
            ("A = b=c", "A", "b=c"),
            ("A = ", "A", ""),
            (r#"A = "b # c" # why"#, "A", "b # c"),
            (r#"A = "\"\\\n" "#, "A", "\"\\\n"),
            (r#"A = C:\new "x""#, "A", r#"C:\new "x""#),
        ] {
            let (seen, read) = parse(line).unwrap().unwrap();
            assert_eq!((seen, &*read), (name, value), "{line}");
        }
        for line in ["", "  ", "# A = b", "   # why"] {
            assert_eq!(parse(line), Ok(None), "{line}");
        }
        for (line, accepted) in [
            ("nonsense", "NAME = VALUE"),
            ("nonsense # A = b", "NAME = VALUE"),
            ("= b", "NAME = VALUE"),
            (r#"A = "b"#, "closing quote"),
            (r#"A = "b" c"#, "after the closing quote"),
            (r#"A = "\t""#, "after a backslash"),
            (r#"A = "\"#, "after a backslash"),
        ] {
            assert!(parse(line).unwrap_err().contains(accepted), "{line}");
        }
    }

    proptest! {
        #[test]
        fn a_formatted_value_is_one_line_that_reads_back(
            value in "[ -~é\n\r\t]{0,12}|.*#.*|\"?[a-z%\\\\]*"
        ) {
            // Values are trimmed before they are formatted.
            let value = value.trim();
            let line = format!("NAME = {}", format_value(value));
            prop_assert_eq!(line.lines().count(), 1);
            let (name, read) = parse(&line).unwrap().unwrap();
            prop_assert_eq!((name, &*read), ("NAME", value));
        }
    }
}
