//! The subscriber of `tracing` events. `DORMOUSE_LOG` selects the events; they go to
//! `DORMOUSE_LOG_FILE` and `dormouse_log_read`. See `docs/decisions/0018-logging.md`.
//!
//! - **L1** No lock, no thread-local with a destructor, no wait: queues are bounded and lock-free,
//!   and a file is written only when it is ready.
//! - **L2** Inside `malloc` and `free` ([`deferred`]) a line is queued; the next function of the header
//!   writes it.
//! - **L3** A forked child emits nothing.
//! - **L4** A subscriber that the program has set stays.

mod output;
mod record;

use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;

use crate::fault::Fault;
use crate::fork;
use crate::params::{Config, Key, LOG_TARGETS, parse_filter};
use crate::status;

pub(crate) use output::{READ_BYTES_MAX, RECORD_BYTES_MAX, drain, expand_path, rank, read};

use output::Output;
use record::Record;

/// Low bits of a span's number, which hold its target.
const TARGET_BITS: u32 = 3;
const _: () = assert!(LOG_TARGETS.len() <= 1 << TARGET_BITS);

static INSTALLED: OnceLock<()> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside `malloc` or `free`.
    static DEFERRED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`; its events are queued, not written (L2).
#[inline]
pub(crate) fn deferred<T>(body: impl FnOnce() -> T) -> T {
    struct Restore<'a>(&'a Cell<bool>, bool);
    impl Drop for Restore<'_> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    DEFERRED.with(|cell| {
        let _restore = Restore(cell, cell.replace(true));
        body()
    })
}

/// Returns whether this thread is inside `malloc` or `free`.
#[inline]
pub(crate) fn is_deferred() -> bool {
    DEFERRED.get()
}

/// Installs the subscriber. Idempotent.
pub(crate) fn install(config: &Config) -> Result<(), Fault> {
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    let filter = parse_filter(config.text(Key::Log)).unwrap_or_default();
    let path = config.path(Key::LogFile);
    Output::open(path.map(std::path::PathBuf::as_path)).map_err(|why| {
        Fault::new(
            status::DORMOUSE_ERR_CONFIG,
            format!("DORMOUSE_LOG_FILE is {:?} ({why})", config.setting(Key::LogFile).to_text()),
        )
    })?;
    // Runtimes are created one at a time. An error means that the program has set one (L4).
    let _set_by_program = tracing::subscriber::set_global_default(Log::new(filter));
    let _first = INSTALLED.set(());
    Ok(())
}

#[derive(Debug)]
struct Log {
    filter: Targets,
    level: LevelFilter,
    spans: AtomicU64,
}

impl Log {
    fn new(filter: Targets) -> Self {
        let default = filter.default_level().unwrap_or(LevelFilter::OFF);
        let level = filter.iter().map(|(_, level)| level).fold(default, LevelFilter::max);
        Self { filter, level, spans: AtomicU64::new(0) }
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.would_enable(metadata.target(), metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    /// A span is two records, begin and end, with the same number. No state is kept in between.
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let target = attributes.metadata().target();
        let place =
            LOG_TARGETS.iter().position(|known| *known == target).unwrap_or_default() as u64;
        let number = (self.spans.fetch_add(1, Ordering::Relaxed) + 1) << TARGET_BITS | place;
        if !fork::in_child() {
            let mut record = Record::new(attributes.metadata());
            attributes.record(&mut record);
            record.begin(attributes.metadata().name(), number);
            emit(record);
        }
        Id::from_non_zero_u64(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
    }

    fn record(&self, _span: &Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if fork::in_child() {
            return;
        }
        let mut record = Record::new(event.metadata());
        event.record(&mut record);
        emit(record);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}

    fn try_close(&self, span: Id) -> bool {
        if !fork::in_child() {
            let number = span.into_u64();
            let place = usize::try_from(number & ((1 << TARGET_BITS) - 1)).unwrap_or_default();
            emit(Record::end(LOG_TARGETS.get(place).copied().unwrap_or("ffi"), number));
        }
        true
    }
}

fn emit(record: Record) {
    output::emit(record, DEFERRED.get());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_that_of_the_most_verbose_target() {
        let level = |text| Log::new(parse_filter(text).unwrap()).level;
        assert_eq!(level("warn"), LevelFilter::WARN);
        assert_eq!(level("error,offload=debug,alloc=info"), LevelFilter::DEBUG);
        assert_eq!(level("offload=info"), LevelFilter::INFO);
        assert_eq!(level("off"), LevelFilter::OFF);
    }

    #[test]
    fn deferral_ends_with_its_body_and_after_a_panic() {
        assert!(!DEFERRED.get());
        deferred(|| {
            deferred(|| assert!(DEFERRED.get()));
            assert!(DEFERRED.get());
        });
        let _panicked = std::panic::catch_unwind(|| deferred(|| panic!("on purpose")));
        assert!(!DEFERRED.get());
    }
}
