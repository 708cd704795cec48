//! The little JSON this room writes, safe inside a `<script>` element of an HTML page.

use std::io::{self, Write};

/// Writes `text` as a JSON string. `<`, `>` and `&` are escaped as well, so that no name can end
/// the script it is embedded in; so are the two line separators JavaScript once tripped over.
pub(crate) fn string(text: &str, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"\"")?;
    for character in text.chars() {
        match character {
            '"' => out.write_all(b"\\\"")?,
            '\\' => out.write_all(b"\\\\")?,
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\u{7f}' => escape(character, out)?,
            control if control < ' ' => escape(control, out)?,
            plain => write!(out, "{plain}")?,
        }
    }
    out.write_all(b"\"")
}

/// Writes `[a,b,…]` of whole numbers.
pub(crate) fn numbers(values: impl Iterator<Item = u64>, out: &mut dyn Write) -> io::Result<()> {
    list(values, out, |value, out| write!(out, "{value}"))
}

/// Writes `[…]` with each element written by `element`.
pub(crate) fn list<T>(
    values: impl Iterator<Item = T>,
    out: &mut dyn Write,
    mut element: impl FnMut(T, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    out.write_all(b"[")?;
    for (at, value) in values.enumerate() {
        if at > 0 {
            out.write_all(b",")?;
        }
        element(value, out)?;
    }
    out.write_all(b"]")
}

fn escape(character: char, out: &mut dyn Write) -> io::Result<()> {
    // Every character escaped here is in the basic plane: one unit.
    write!(out, "\\u{:04x}", u32::from(character))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[expect(clippy::unwrap_used, reason = "test helper")]
    fn written(text: &str) -> String {
        let mut out = Vec::new();
        string(text, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_script_end_cannot_be_spelled() {
        assert_eq!(written("</script>&\u{2028}"), r#""\u003c/script\u003e\u0026\u2028""#);
    }

    proptest! {
        #[test]
        fn any_string_is_read_back_by_another_parser(text in any::<String>()) {
            let json = written(&text);
            prop_assert!(!json.contains('<'));
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }

        #[test]
        fn numbers_are_read_back(values: Vec<u64>) {
            let mut out = Vec::new();
            numbers(values.iter().copied(), &mut out).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Vec<u64>>(&out).unwrap(), values);
        }
    }
}
