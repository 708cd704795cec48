//! The message before the process ends, built without allocation.

use super::name_bytes;
use super::rescue::Rescue;
use crate::SpanLabel;

/// Above the longest message: fixed text, a name of 24 bytes, a reason and a few numbers.
const MESSAGE_BYTES_MAX: usize = 544;

/// A message. Text beyond the limit is cut.
#[derive(Debug)]
pub(super) struct Message {
    bytes: [u8; MESSAGE_BYTES_MAX],
    used: usize,
}

/// The access that a message reports.
#[derive(Debug)]
pub(super) struct Touch<'a> {
    pub(super) thread: u64,
    pub(super) address: usize,
    pub(super) access: &'static str,
    pub(super) label: &'a SpanLabel,
    pub(super) state: &'static str,
}

impl Message {
    fn new() -> Self {
        Self { bytes: [0; MESSAGE_BYTES_MAX], used: 0 }
    }

    /// The message for an access to an asleep span that was not rescued.
    pub(super) fn stray(touch: &Touch<'_>, rescue: &Rescue) -> Self {
        let mut message = Self::new();
        message.opening(touch, "a sleeping block");
        match rescue {
            Rescue::Awake | Rescue::None => message.text(": wake it first"),
            Rescue::Failed(reason) => {
                message.text(": it did not wake (");
                message.line(reason.iter().take_while(|byte| **byte != 0));
                message.text(")");
            }
            Rescue::TimedOut { limit_ms } => {
                message.text(": it did not wake within ");
                message.number(*limit_ms, 10);
                message.text(" ms");
            }
        }
        message.text("; the process stops here\n");
        message
    }

    /// The message for a write to a frozen span that the system cannot make writable.
    pub(super) fn stuck(touch: &Touch<'_>) -> Self {
        let mut message = Self::new();
        message.opening(touch, "a block on its way to sleep");
        message.text(" and the system would not make it writable again; the process stops here\n");
        message
    }

    fn opening(&mut self, touch: &Touch<'_>, what: &str) {
        self.text("dormouse: thread ");
        self.number(touch.thread, 10);
        self.text(" touched 0x");
        self.number(touch.address as u64, 16);
        self.text(" (");
        self.text(touch.access);
        self.text(") in ");
        self.text(what);
        self.text(" (tag \"");
        self.line(name_bytes(touch.label).iter());
        self.text("\", ");
        if touch.label.layer != u32::MAX {
            self.text("layer ");
            self.number(u64::from(touch.label.layer), 10);
            self.text(", ");
        }
        self.text(touch.state);
        self.text(")");
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or_default()
    }

    /// Appends bytes of others; the message stays on one line.
    fn line<'a>(&mut self, bytes: impl Iterator<Item = &'a u8>) {
        bytes.for_each(|byte| self.byte(if byte.is_ascii_control() { b'?' } else { *byte }));
    }

    fn byte(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.used) {
            *place = byte;
            self.used += 1;
        }
    }

    fn text(&mut self, text: &str) {
        text.bytes().for_each(|byte| self.byte(byte));
    }

    fn number(&mut self, number: u64, base: u64) {
        let mut digits = [0_u8; 20];
        let mut rest = number;
        let mut count = 0;
        for place in &mut digits {
            *place = b"0123456789abcdef".get((rest % base) as usize).copied().unwrap_or(b'?');
            rest /= base;
            count += 1;
            if rest == 0 {
                break;
            }
        }
        digits.iter().take(count).rev().for_each(|digit| self.byte(*digit));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::channel::REASON_BYTES_MAX;
    use super::*;

    fn label(name: &str, layer: u32) -> SpanLabel {
        let mut label = SpanLabel { layer, ..SpanLabel::default() };
        label.name[..name.len()].copy_from_slice(name.as_bytes());
        label
    }

    fn touch(label: &SpanLabel) -> Touch<'_> {
        Touch { thread: 123, address: 0x7f00_dead_b000, access: "read", label, state: "asleep" }
    }

    #[test]
    fn message_names_thread_address_block_and_remedy() {
        let label = label("prefix", 7);
        let message = Message::stray(&touch(&label), &Rescue::None);
        assert_eq!(
            std::str::from_utf8(message.as_bytes()).unwrap(),
            "dormouse: thread 123 touched 0x7f00deadb000 (read) in a sleeping block \
             (tag \"prefix\", layer 7, asleep): wake it first; the process stops here\n"
        );
    }

    #[test]
    fn omits_a_missing_layer_and_replaces_control_characters() {
        let label = label("a\nb", u32::MAX);
        let message = Message::stray(&touch(&label), &Rescue::None);
        let text = std::str::from_utf8(message.as_bytes()).unwrap();
        assert!(text.contains("(tag \"a?b\", asleep)"), "{text}");
    }

    #[test]
    fn a_message_says_why_a_block_did_not_wake() {
        let label = label("prefix", 7);
        let mut reason = [0; REASON_BYTES_MAX];
        reason[..9].copy_from_slice(b"CRC\ndiffs");
        let failed = Message::stray(&touch(&label), &Rescue::Failed(reason));
        let text = std::str::from_utf8(failed.as_bytes()).unwrap();
        assert!(text.ends_with("asleep): it did not wake (CRC?diffs); the process stops here\n"));
        let late = Message::stray(&touch(&label), &Rescue::TimedOut { limit_ms: 1500 });
        let text = std::str::from_utf8(late.as_bytes()).unwrap();
        assert!(text.ends_with(": it did not wake within 1500 ms; the process stops here\n"));
    }

    #[test]
    fn longest_message_fits() {
        let label = SpanLabel { name: [b'n'; 24], layer: u32::MAX - 1 };
        let touch = Touch {
            thread: u64::MAX,
            address: usize::MAX,
            access: "unknown access",
            label: &label,
            state: "being written to",
        };
        let message = Message::stuck(&touch);
        assert!(message.as_bytes().ends_with(b"the process stops here\n"));
        assert!(message.as_bytes().len() < MESSAGE_BYTES_MAX);
        let message = Message::stray(&touch, &Rescue::Failed([b'r'; REASON_BYTES_MAX]));
        assert!(message.as_bytes().ends_with(b"r); the process stops here\n"));
        assert!(message.as_bytes().len() < MESSAGE_BYTES_MAX);
    }
}
