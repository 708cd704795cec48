//! Collects the log events of a test's own thread.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// An event, or the begin of a span.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its level.
    pub level: Level,
    /// Its target.
    pub target: &'static str,
    /// The message of an event, the name of a span.
    pub message: String,
    /// Its fields, as text.
    pub fields: BTreeMap<&'static str, String>,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.insert(field.name(), text);
        }
    }
}

#[derive(Default)]
struct Collector {
    seen: Arc<Mutex<Vec<Seen>>>,
    spans: AtomicU64,
}

impl Collector {
    fn push(&self, metadata: &'static Metadata<'static>, fill: impl FnOnce(&mut Seen)) {
        let mut seen = Seen {
            level: *metadata.level(),
            target: metadata.target(),
            message: if metadata.is_span() { metadata.name().to_owned() } else { String::new() },
            fields: BTreeMap::new(),
        };
        fill(&mut seen);
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }
}

impl Subscriber for Collector {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        self.push(attributes.metadata(), |seen| attributes.record(seen));
        Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn event(&self, event: &Event<'_>) {
        self.push(event.metadata(), |seen| event.record(seen));
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// The process's subscriber: wants nothing, and keeps every callsite asking its thread's collector.
/// Without it a callsite that another thread registers just then may be cached as never enabled.
struct Undecided;

impl Subscriber for Undecided {
    fn register_callsite(&self, _metadata: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        false
    }

    fn new_span(&self, _attributes: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, _event: &Event<'_>) {}

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Time for registrations that began before the process had a subscriber.
const REGISTRATION: Duration = Duration::from_millis(50);

/// Runs `body` and returns what this thread emitted in it, in order.
pub fn collect<T>(body: impl FnOnce() -> T) -> (T, Vec<Seen>) {
    static SET: Once = Once::new();
    SET.call_once(|| {
        // An error means that the test has a subscriber of its own.
        let _ = tracing::subscriber::set_global_default(Undecided);
        std::thread::sleep(REGISTRATION);
        tracing::callsite::rebuild_interest_cache();
    });
    let seen = Arc::default();
    let collector = Collector { seen: Arc::clone(&seen), spans: AtomicU64::new(0) };
    let result = tracing::subscriber::with_default(collector, body);
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    (result, seen)
}

/// Those of `seen` with this message.
pub fn with_message<'a>(seen: &'a [Seen], message: &str) -> Vec<&'a Seen> {
    seen.iter().filter(|seen| seen.message == message).collect()
}
