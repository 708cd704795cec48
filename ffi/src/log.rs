//! The subscriber of `tracing` events: lines to a file, records to whoever reads them.
//!
//! Rooms only emit events. This module decides which of them count (`DORMOUSE_LOG`), and where they
//! go (`DORMOUSE_LOG_FILE`, `dormouse_log_read`). See `docs/decisions/0018-logging.md`.
//!
//! - **L1** No lock, no thread-local with a destructor, no wait: queues are bounded and lock-free,
//!   and a file that is not ready is not written to.
//! - **L2** Nothing is written while the thread is inside `malloc` or `free` ([`deferred`]): the
//!   line is queued, and the next call of the boundary writes it.
//! - **L3** Nothing is emitted in a forked child.
//! - **L4** A subscriber that the program has set already stays.

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
use crate::params::{Config, Key};
use crate::status;

pub(crate) use output::{READ_BYTES_MAX, RECORD_BYTES_MAX, drain, read};

use output::Output;
use record::Record;

/// Names that a filter can set a level for.
pub(crate) const TARGETS: &[&str] = &["alloc", "device", "ffi", "offload", "schedule", "storage"];

/// Bits of a span's number that say which target it has.
const TARGET_BITS: u32 = 3;
const _: () = assert!(TARGETS.len() <= 1 << TARGET_BITS);

/// Variables that launchers set to the rank of a process, the first that is set counts.
const RANK_VARIABLES: &[&str] = &["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

static INSTALLED: OnceLock<()> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside `malloc` or `free`. Constant-initialised, no destructor.
    static DEFERRED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, in which events are queued and not written (L2).
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

/// Parses a filter such as `info,offload=debug`. `None`: not accepted.
pub(crate) fn parse_filter(text: &str) -> Option<Targets> {
    let targets: Targets = text.parse().ok()?;
    // A word that is no level is a target to the parser: only known ones are accepted.
    let known = |name: &str| {
        let room = name.split("::").next().unwrap_or(name);
        TARGETS.contains(&room)
    };
    targets.iter().all(|(name, _)| known(name)).then_some(targets)
}

/// The rank of this process, as its launcher set it.
pub(crate) fn rank() -> Option<u64> {
    rank_from(|name| std::env::var(name).ok())
}

fn rank_from(variable: impl Fn(&str) -> Option<String>) -> Option<u64> {
    RANK_VARIABLES.iter().find_map(|name| variable(name)?.trim().parse().ok())
}

/// Installs the subscriber, once per process.
pub(crate) fn install(config: &Config) -> Result<(), Fault> {
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    let filter = parse_filter(config.text(Key::Log)).unwrap_or_default();
    let path = config.path(Key::LogFile);
    Output::open(path.map(std::path::PathBuf::as_path)).map_err(|why| {
        Fault::new(
            status::DORMOUSE_ERR_CONFIG,
            format!("DORMOUSE_LOG_FILE is {:?} ({why})", config.setting(Key::LogFile).shown()),
        )
    })?;
    // Runtimes are created one at a time, so nothing else here sets it. Failure: the program did (L4).
    let _set_by_program = tracing::subscriber::set_global_default(Log::new(filter));
    let _first = INSTALLED.set(());
    Ok(())
}

/// The subscriber.
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

    /// A span is two records, begin and end, which its number joins: nothing is kept in between.
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let target = attributes.metadata().target();
        let place = TARGETS.iter().position(|known| *known == target).unwrap_or_default() as u64;
        // The target travels in the low bits, for the record of the end.
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
            emit(Record::end(TARGETS.get(place).copied().unwrap_or("ffi"), number));
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
    use tracing::Level;

    #[test]
    fn filters_take_levels_and_known_targets_only() {
        let filter = parse_filter("info,offload=debug").unwrap();
        assert!(filter.would_enable("offload", &Level::DEBUG));
        assert!(!filter.would_enable("alloc", &Level::DEBUG));
        assert!(filter.would_enable("alloc", &Level::INFO));
        assert!(!parse_filter("off").unwrap().would_enable("ffi", &Level::ERROR));
        assert!(parse_filter("offload::engine=trace").is_some());
        for text in ["verbose", "info,teapot=debug", "offload=loud", "info;offload=debug", "=info"]
        {
            assert!(parse_filter(text).is_none(), "{text}");
        }
    }

    #[test]
    fn the_level_is_that_of_the_most_talkative_target() {
        let level = |text| Log::new(parse_filter(text).unwrap()).level;
        assert_eq!(level("warn"), LevelFilter::WARN);
        assert_eq!(level("error,offload=debug,alloc=info"), LevelFilter::DEBUG);
        assert_eq!(level("offload=info"), LevelFilter::INFO);
        assert_eq!(level("off"), LevelFilter::OFF);
    }

    #[test]
    fn the_rank_is_the_first_that_a_launcher_set() {
        let of = |set: &'static [(&str, &str)]| {
            rank_from(move |name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_PROCID", "3"), ("OMPI_COMM_WORLD_RANK", "2")]), Some(2));
        assert_eq!(of(&[("RANK", "none"), ("SLURM_PROCID", "3")]), Some(3));
    }

    #[test]
    fn deferring_ends_with_its_body_also_by_a_panic() {
        assert!(!DEFERRED.get());
        deferred(|| {
            deferred(|| assert!(DEFERRED.get()));
            assert!(DEFERRED.get());
        });
        let _panicked = std::panic::catch_unwind(|| deferred(|| panic!("on purpose")));
        assert!(!DEFERRED.get());
    }
}
