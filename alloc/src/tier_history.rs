//! What another tier holds of sleeping memory: its pieces, and their history. The engine tells it.

use crate::history::{
    History, HistoryAction, HistoryEvent, HistoryOptions, MappedRange, MemoryReading, RangeUse,
};
use dormouse_device::AddressRange;
use dormouse_device::sync::Mutex;
use std::collections::BTreeMap;

/// The pieces of one tier, and their history while it is on. All methods are any-thread.
#[derive(Debug, Default)]
pub struct TierHistory(Mutex<Pieces>);

#[derive(Debug, Default)]
struct Pieces {
    /// Bytes by address.
    held: BTreeMap<usize, u64>,
    history: Option<History>,
}

impl Pieces {
    fn note(&mut self, action: HistoryAction, address: usize, bytes: u64) {
        if let Some(history) = &mut self.history {
            history.push(&HistoryEvent::now(action, address, bytes));
        }
    }
}

impl TierHistory {
    pub(crate) fn start(&self, options: HistoryOptions, forgets: bool) {
        let mut pieces = self.0.lock();
        pieces.history.get_or_insert_default().start_ring(options, forgets);
    }

    pub(crate) fn stop(&self) {
        self.0.lock().history = None;
    }

    /// Notes that the tier holds `bytes` at `address`, where it held nothing.
    pub fn note_taken(&self, address: usize, bytes: u64) {
        let mut pieces = self.0.lock();
        pieces.held.insert(address, bytes);
        pieces.note(HistoryAction::Mapped, address, bytes);
        pieces.note(HistoryAction::Allocated, address, bytes);
    }

    /// Notes that the tier does not hold the piece at `address` any more.
    pub fn note_given(&self, address: usize) {
        let mut pieces = self.0.lock();
        if let Some(bytes) = pieces.held.remove(&address) {
            pieces.note(HistoryAction::Freed, address, bytes);
            pieces.note(HistoryAction::Unmapped, address, bytes);
        }
    }

    /// Notes that the tier holds nothing any more.
    pub fn note_closed(&self) {
        let held: Vec<usize> = self.0.lock().held.keys().copied().collect();
        held.into_iter().for_each(|address| self.note_given(address));
    }

    /// Returns what the tier holds and, `with_events`, its history, of one moment.
    #[must_use]
    pub fn read(&self, with_events: bool) -> MemoryReading {
        let mut pieces = self.0.lock();
        if with_events {
            let held_bytes = pieces.held.values().sum();
            pieces.note(HistoryAction::Read, 0, held_bytes);
        }
        let ranges = (0_u32..).zip(&pieces.held).map(|(segment, (&address, &bytes))| MappedRange {
            // A tier holds no more than there are addresses.
            range: AddressRange::new(address, usize::try_from(bytes).unwrap_or(usize::MAX)),
            usage: RangeUse::Allocated,
            segment,
            requested_bytes: bytes,
            stream: 0,
            is_small: false,
            arena: None,
            scope: 0,
            tag: 0,
            context: 0,
        });
        let history = pieces.history.as_ref();
        let events = history.filter(|_| with_events).map(History::events);
        MemoryReading {
            ranges: ranges.collect(),
            events: events.unwrap_or_default(),
            event_count: history.map_or(0, History::event_count),
            recorded: history.map_or(0, History::recorded),
            events_max: history.map_or(0, History::events_max),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: HistoryOptions = HistoryOptions { events_max: 64, skipped: 0 };

    #[test]
    fn pieces_are_known_without_a_history_and_recorded_with_one() {
        let tier = TierHistory::default();
        tier.note_taken(4096, 100);
        assert_eq!(tier.read(true).events, []);
        tier.start(ALL, false);
        tier.note_taken(8192, 50);
        tier.note_given(4096);
        tier.note_given(4096);
        let reading = tier.read(true);
        let pieces: Vec<_> =
            reading.ranges.iter().map(|it| (it.range.start, it.range.bytes)).collect();
        assert_eq!(pieces, [(8192, 50)]);
        let events: Vec<_> =
            reading.events.iter().map(|it| (it.action, it.address, it.bytes)).collect();
        assert_eq!(
            events,
            [
                (HistoryAction::Mapped, 8192, 50),
                (HistoryAction::Allocated, 8192, 50),
                (HistoryAction::Freed, 4096, 100),
                (HistoryAction::Unmapped, 4096, 100),
                (HistoryAction::Read, 0, 50),
            ]
        );
        tier.note_closed();
        assert!(tier.read(false).ranges.is_empty());
        tier.stop();
        assert_eq!(tier.read(true).events_max, 0);
    }
}
