//! Reads the wire format of protocol buffers, as far as traces use it.

use std::io::{self, Read};

/// Tag of `Trace.packet`: field 1, length-delimited.
pub(crate) const PACKET_TAG: u8 = 0x0a;
/// Maximum bytes of a packet: the longest that a dump writes interns 1024 names.
const PACKET_BYTES_MAX: u64 = 16 << 20;
/// Maximum bytes of a varint.
const VARINT_BYTES_MAX: u32 = 10;

/// What is wrong with a trace, with the place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("byte {at} is {seen:#04x}, accepted: {PACKET_TAG:#04x}, the start of a packet")]
    Tag { at: u64, seen: u8 },
    #[error("the packet at byte {at} has {seen} bytes, accepted: at most {PACKET_BYTES_MAX}")]
    Length { at: u64, seen: u64 },
    #[error("the file ends within the packet at byte {at}")]
    Truncated { at: u64 },
    #[error("a packet is malformed")]
    Malformed,
}

/// Returns the packets of a trace, one at a time.
pub(crate) fn packets(reader: &mut dyn Read) -> Packets<'_> {
    Packets { reader, at: 0, is_over: false }
}

/// See [`packets`].
pub(crate) struct Packets<'a> {
    reader: &'a mut dyn Read,
    at: u64,
    is_over: bool,
}

impl Iterator for Packets<'_> {
    type Item = Result<Vec<u8>, WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let packet = self.packet().transpose();
        self.is_over = !matches!(packet, Some(Ok(_)));
        packet
    }
}

impl Packets<'_> {
    fn packet(&mut self) -> Result<Option<Vec<u8>>, WireError> {
        let at = self.at;
        match self.byte()? {
            None => return Ok(None),
            Some(PACKET_TAG) => {}
            Some(seen) => return Err(WireError::Tag { at, seen }),
        }
        let mut length = 0;
        for shift in 0..VARINT_BYTES_MAX {
            let byte = self.byte()?.ok_or(WireError::Truncated { at })?;
            length |= u64::from(byte & 0x7f).checked_shl(7 * shift).unwrap_or(0);
            if byte < 0x80 {
                break;
            }
        }
        if length > PACKET_BYTES_MAX {
            return Err(WireError::Length { at, seen: length });
        }
        let mut packet = Vec::new();
        (&mut self.reader).take(length).read_to_end(&mut packet)?;
        self.at += packet.len() as u64;
        if packet.len() as u64 != length {
            return Err(WireError::Truncated { at });
        }
        Ok(Some(packet))
    }

    fn byte(&mut self) -> Result<Option<u8>, WireError> {
        let mut byte = [0];
        let read = self.reader.read(&mut byte)?;
        self.at += read as u64;
        Ok((read == 1).then_some(byte[0]))
    }
}

/// A value of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message by number, in the order of the message.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in 0..VARINT_BYTES_MAX {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f).checked_shl(7 * shift).unwrap_or(0);
            if *byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(head)
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Field::Number(self.varint()?),
            1 => Field::Number(u64::from_le_bytes(self.take(8)?.try_into().ok()?)),
            2 => {
                let length = self.varint()?;
                Field::Bytes(self.take(length)?)
            }
            5 => Field::Number(u32::from_le_bytes(self.take(4)?.try_into().ok()?).into()),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field().ok_or(WireError::Malformed);
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_as_the_specification_says() {
        let message =
            [0x08, 0x96, 0x01, 0x12, 2, b'h', b'i', 0x1d, 7, 0, 0, 0, 0x21, 9, 0, 0, 0, 0, 0, 0, 0];
        let fields: Vec<_> = Fields::of(&message).map(Result::unwrap).collect();
        let wanted = [
            (1, Field::Number(150)),
            (2, Field::Bytes(b"hi")),
            (3, Field::Number(7)),
            (4, Field::Number(9)),
        ];
        assert_eq!(fields, wanted);
        for cut in [1, 2, 4, 6, 9, 20] {
            assert!(Fields::of(&message[..cut]).last().unwrap().is_err(), "{cut}");
        }
        assert!(Fields::of(&[0x0b]).last().unwrap().is_err(), "a group");
        assert!(Fields::of(&[0xff; 11]).last().unwrap().is_err(), "a varint without end");
    }

    #[test]
    fn packets_are_bounded_and_whole() {
        let read = |mut bytes: &[u8]| packets(&mut bytes).collect::<Result<Vec<_>, _>>();
        assert_eq!(read(&[0x0a, 1, 7, 0x0a, 0]).unwrap(), [vec![7], vec![]]);
        assert!(matches!(read(&[0x0a, 2, 7]), Err(WireError::Truncated { at: 0 })));
        assert!(matches!(read(&[0x0a]), Err(WireError::Truncated { at: 0 })));
        assert!(matches!(read(&[0x0a, 0, 0x7b]), Err(WireError::Tag { at: 2, seen: 0x7b })));
        let long = [0x0a, 0xff, 0xff, 0xff, 0xff, 0x7f];
        assert!(matches!(read(&long), Err(WireError::Length { at: 0, .. })));
    }
}
