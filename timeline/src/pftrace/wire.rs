//! An encoder for the protobuf wire format, limited to the field types that a trace needs.

const WIRE_VARINT: u32 = 0;
const WIRE_FIXED64: u32 = 1;
const WIRE_BYTES: u32 = 2;
/// Maximum bytes of a 64-bit varint.
const VARINT_BYTES_MAX: usize = 10;

/// An encoded message. Methods append fields.
#[derive(Clone, Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// A field of type uint32, uint64, bool or enum.
    pub(super) fn unsigned(&mut self, field: u32, value: u64) {
        self.key(field, WIRE_VARINT);
        self.varint(value);
    }

    /// A field of type fixed64.
    pub(super) fn fixed64(&mut self, field: u32, value: u64) {
        self.key(field, WIRE_FIXED64);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// A field of type string.
    pub(super) fn text(&mut self, field: u32, value: &str) {
        self.bytes(field, value.as_bytes());
    }

    /// A field of type bytes, or an encoded message.
    pub(super) fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, WIRE_BYTES);
        self.varint(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    /// A message field, built in place. Its length, known only afterwards, is appended and rotated to the
    /// front.
    pub(super) fn message(&mut self, field: u32, build: impl FnOnce(&mut Self)) {
        self.key(field, WIRE_BYTES);
        let start = self.bytes.len();
        build(self);
        let end = self.bytes.len();
        self.varint((end - start) as u64);
        let length_bytes = self.bytes.len() - end;
        self.bytes[start..].rotate_right(length_bytes);
    }

    fn key(&mut self, field: u32, wire: u32) {
        self.varint(u64::from(field << 3 | wire));
    }

    fn varint(&mut self, mut value: u64) {
        for _ in 0..VARINT_BYTES_MAX {
            let low = (value & 0x7f) as u8;
            value >>= 7;
            if value == 0 {
                self.bytes.push(low);
                return;
            }
            self.bytes.push(low | 0x80);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_specification() {
        let mut message = Message::default();
        message.unsigned(1, 150);
        assert_eq!(message.as_bytes(), [0x08, 0x96, 0x01]);
        message.clear();
        message.text(2, "testing");
        assert_eq!(message.as_bytes(), b"\x12\x07testing");
        message.clear();
        message.fixed64(47, 1);
        assert_eq!(message.as_bytes(), [0xf9, 0x02, 1, 0, 0, 0, 0, 0, 0, 0]);
        message.clear();
        message.unsigned(1, u64::MAX);
        assert_eq!(message.len(), 1 + VARINT_BYTES_MAX);
    }

    #[test]
    fn a_message_built_in_place_equals_one_built_apart() {
        for len in [0, 1, 127, 128, 20_000] {
            let text = "x".repeat(len);
            let mut apart = Message::default();
            apart.text(3, &text);
            let (mut outer, mut expected) = (Message::default(), Message::default());
            outer.message(1, |inner| inner.text(3, &text));
            expected.bytes(1, apart.as_bytes());
            assert_eq!(outer.as_bytes(), expected.as_bytes(), "length {len}");
        }
    }
}
