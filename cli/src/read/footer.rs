//! Check of the schema depth in a Parquet footer.
//!
//! The `parquet` crate reads a schema recursively without a depth limit: a footer of 40 kB can overflow the
//! stack, which aborts the process. This module parses the footer, in Thrift's compact protocol, only for
//! the nesting of groups and skips everything else.

/// Maximum depth of groups; the columns read here have a depth of three.
const DEPTH_MAX: usize = 64;

/// The metadata field that lists the schema in depth-first order, and the field of an element that counts
/// its children.
const SCHEMA_FIELD: i64 = 2;
const CHILDREN_FIELD: i64 = 5;

/// Value types of the compact protocol; a boolean field has no bytes.
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const SHORT: u8 = 4;
const INT: u8 = 5;
const LONG: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
const STRUCT: u8 = 12;
const UUID: u8 = 13;

/// Checks the schema depth of a footer.
pub(super) fn check_depth(footer: &[u8]) -> Result<(), String> {
    let mut cursor = Cursor { left: footer };
    cursor.metadata().unwrap_or_else(|| Err("its footer is truncated".to_owned()))
}

/// The remaining bytes. Methods return `None` if they end early or have an unknown type.
struct Cursor<'a> {
    left: &'a [u8],
}

impl Cursor<'_> {
    fn metadata(&mut self) -> Option<Result<(), String>> {
        let mut field = 0;
        while let Some(kind) = self.field(&mut field)? {
            if (field, kind) != (SCHEMA_FIELD, LIST) {
                self.skip(kind, 0)?;
                continue;
            }
            if let Err(depth) = self.schema()? {
                let what = format!("its schema has depth {depth}; accepted: at most {DEPTH_MAX}");
                return Some(Err(what));
            }
        }
        Some(Ok(()))
    }

    /// Parses the list of schema elements; returns the depth if it is too large.
    fn schema(&mut self) -> Option<Result<(), usize>> {
        let (elements, _) = self.list()?;
        // Remaining children of each open group.
        let mut open: Vec<u64> = Vec::new();
        for _ in 0..elements {
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            let children = self.element()?;
            if children > 0 {
                open.push(children);
            }
            if open.len() > DEPTH_MAX {
                return Some(Err(open.len()));
            }
        }
        Some(Ok(()))
    }

    /// Parses a schema element and returns its number of children.
    fn element(&mut self) -> Option<u64> {
        let (mut field, mut children) = (0, 0);
        while let Some(kind) = self.field(&mut field)? {
            if (field, kind) == (CHILDREN_FIELD, INT) {
                // The reader refuses negative counts.
                children = u64::try_from(self.signed()?).unwrap_or(0);
            } else {
                self.skip(kind, 0)?;
            }
        }
        Some(children)
    }

    /// Parses the type of a struct's next field and updates its number; `Some(None)` at the end.
    fn field(&mut self, number: &mut i64) -> Option<Option<u8>> {
        let head = self.byte()?;
        if head == 0 {
            return Some(None);
        }
        *number = match head >> 4 {
            0 => self.signed()?,
            step => number.checked_add(step.into())?,
        };
        Some(Some(head & 0xf))
    }

    /// Parses the length and element type of a list.
    fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.unsigned()? } else { (head >> 4).into() };
        Some((count, head & 0xf))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        let deeper = depth + 1;
        if deeper > DEPTH_MAX {
            return None;
        }
        match kind {
            TRUE | FALSE => {}
            BYTE => drop(self.byte()?),
            SHORT | INT | LONG => drop(self.unsigned()?),
            DOUBLE => self.bytes(8)?,
            UUID => self.bytes(16)?,
            BINARY => {
                let bytes = self.unsigned()?;
                self.bytes(bytes)?;
            }
            LIST | SET => {
                let (count, kind) = self.list()?;
                for _ in 0..count {
                    self.skip_item(kind, deeper)?;
                }
            }
            MAP => {
                let count = self.unsigned()?;
                let kinds = if count == 0 { 0 } else { self.byte()? };
                for _ in 0..count {
                    self.skip_item(kinds >> 4, deeper)?;
                    self.skip_item(kinds & 0xf, deeper)?;
                }
            }
            STRUCT => {
                let mut field = 0;
                while let Some(kind) = self.field(&mut field)? {
                    self.skip(kind, deeper)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Skips a list item. A boolean takes one byte there, so every count is bounded by the input.
    fn skip_item(&mut self, kind: u8, depth: usize) -> Option<()> {
        if matches!(kind, TRUE | FALSE) { self.bytes(1) } else { self.skip(kind, depth) }
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, left) = self.left.split_first()?;
        self.left = left;
        Some(*byte)
    }

    fn bytes(&mut self, count: u64) -> Option<()> {
        self.left = self.left.get(usize::try_from(count).ok()?..)?;
        Some(())
    }

    /// Parses a varint: seven bits per byte, lowest first.
    fn unsigned(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// Parses a zigzag-encoded integer.
    fn signed(&mut self) -> Option<i64> {
        let number = self.unsigned()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metadata of a schema of one group in another, `depth` of them, and a number beside it.
    fn nested(depth: usize) -> Vec<u8> {
        let one_in_it = [0x35, 2, 0x18, 1, b'a', 0x15, 2, 0];
        let leaf = [0x15, 2, 0x25, 0, 0x18, 1, b'x', 0];
        let mut bytes = vec![0x15, 2, 0x19, 0xfc, (depth + 1) as u8];
        bytes.extend(one_in_it.repeat(depth));
        bytes.extend(leaf);
        bytes.extend([0x16, 0, 0]);
        bytes
    }

    #[test]
    fn refuses_a_schema_that_is_too_deep() {
        assert_eq!(check_depth(&nested(DEPTH_MAX)), Ok(()));
        let said = check_depth(&nested(DEPTH_MAX + 1)).unwrap_err();
        assert_eq!(said, "its schema has depth 65; accepted: at most 64");
        // The same, with the number of the field in full.
        let said_in_full = [&[0x15, 2, 0x09, 4], &nested(DEPTH_MAX + 1)[3..]].concat();
        assert!(check_depth(&said_in_full).unwrap_err().contains("depth 65"));
        // Side by side is not deep: a root of a hundred groups of one.
        let group = [0x55, 2, 0, 0x15, 2, 0];
        let side_by_side =
            [&[0x29, 0xfc, 201, 1, 0x55, 200, 1, 0][..], &group.repeat(100), &[0]].concat();
        assert_eq!(check_depth(&side_by_side), Ok(()));
    }

    #[test]
    fn refuses_a_truncated_footer() {
        let whole = nested(3);
        for end in 0..whole.len() {
            assert!(check_depth(&whole[..end]).is_err(), "{end}");
        }
    }

    /// A field skipped by too many or too few bytes would miss the end.
    #[test]
    fn skips_every_type_of_field() {
        let fields: [&[u8]; 12] = [
            &[0x11],                                                 // true
            &[0x13, 7],                                              // a byte
            &[0x16, 0x80, 0x01],                                     // a number of two bytes
            &[0x17, 1, 2, 3, 4, 5, 6, 7, 8],                         // a double
            &[0x18, 2, b'h', b'i'],                                  // a text
            &[0x1d, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7], // an identifier
            &[0x19, 0x21, 1, 2],                                     // two that are true or false
            &[0x1a, 0x15, 9],                                        // a set of a number
            &[0x1b, 1, 0x58, 3, 1, b'x'], // a map from a number to a text
            &[0x1b, 0],                   // an empty map
            &[0x1c, 0x15, 4, 0x11, 0],    // a struct
            &[0x05, 0x50, 4],             // a number of a field said in full
        ];
        for field in fields {
            let whole = [field, &[0]].concat();
            assert_eq!(check_depth(&whole), Ok(()), "{field:?}");
            assert!(check_depth(field).is_err(), "{field:?} without an end");
        }
        let deep = |depth: usize| [vec![0x1c; depth], vec![0; depth + 1]].concat();
        assert_eq!(check_depth(&deep(DEPTH_MAX)), Ok(()));
        assert!(check_depth(&deep(DEPTH_MAX + 1)).is_err(), "structs in structs");
        assert!(check_depth(&[0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x7f]).is_err(), "a long list");
    }
}
