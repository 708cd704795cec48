//! A dialogue that threads share.

use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::entry::{Entry, NewEntry, check_embedding, check_finite};
use super::index::Row;
use super::log::Log;
use super::record::entry_bytes;
use super::state::{Scored, Search, State, Weighing};
use super::vectors::normalise;
use crate::dir::HistoryDir;
use crate::error::HistoryError;
use crate::limits::{
    CHAIN_ENTRIES_MAX, CHAIN_RELEVANCE_MIN, DIMENSION_MAX, ENTRIES_MAX, ENTRY_IDS_MAX,
    RECORDED_ENTRIES_MAX, RETRIEVED_MAX,
};

/// Entries that are inserted while retrievals wait.
const INSERTED_ENTRIES: usize = 64;

/// Settings of a dialogue.
#[derive(Clone, Debug, PartialEq)]
pub struct DialogueOptions {
    /// Numbers of an embedding, at most [`DIMENSION_MAX`].
    pub dimension: usize,
    /// Most entries, at most [`ENTRIES_MAX`].
    pub entries_max: usize,
    /// α: the share of relevance in a weight, from 0 to 1.
    pub alpha: f32,
    /// Seconds in which recency falls to 1/e; more than 0.
    pub decay_s: f64,
    /// Entries that a retrieval looks at, at least; with as many as there are it is exact.
    pub scanned_entries: usize,
    /// Whether a record waits for the disk. Without, the death of the process loses nothing, that of the machine
    /// perhaps the last seconds.
    pub synced: bool,
}

/// An entry that was retrieved.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The entry.
    pub entry: Arc<Entry>,
    /// α · relevance + (1 − α) · recency.
    pub weight: f32,
    /// Cosine of the queries' embeddings; 0 for an embedding of zeros.
    pub relevance: f32,
    /// exp(−age / decay), 1 for what is of a later time.
    pub recency: f32,
}

/// Figures of a dialogue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DialogueStats {
    /// Entries.
    pub entries: u64,
    /// Entries that were forgotten for better ones, by this object.
    pub forgotten_entries: u64,
    /// Categories of summaries.
    pub categories: u64,
    /// Summaries of entries.
    pub summaries: u64,
    /// Bytes of the log.
    pub log_bytes: u64,
}

/// Earlier turns. Any-thread: retrievals run beside each other and beside a record's wait for the disk.
#[derive(Debug)]
pub struct Dialogue {
    options: DialogueOptions,
    /// Taken before `state` by whoever changes it.
    writer: Mutex<Writer>,
    state: RwLock<State>,
    torn: Option<String>,
    _dir: Option<HistoryDir>,
}

#[derive(Debug)]
struct Writer {
    log: Option<Log>,
    next_id: u64,
    forgotten: u64,
    /// Entries that were forgotten when the log was opened. The next record says so in the log; until then another
    /// limit finds them again.
    unlogged: Vec<u64>,
}

impl DialogueOptions {
    /// Returns settings: 100,000 entries, α = 0.5, 7 days, 2048 entries looked at, synced.
    #[must_use]
    pub const fn of_dimension(dimension: usize) -> Self {
        Self {
            dimension,
            entries_max: 100_000,
            alpha: 0.5,
            decay_s: 7.0 * 24.0 * 3600.0,
            scanned_entries: 2048,
            synced: true,
        }
    }

    fn check(&self) -> Result<(), HistoryError> {
        let in_range = |name, value: usize, max: usize| match value {
            1.. if value <= max => Ok(()),
            _ => Err(HistoryError::Range { name, value: value as u64, min: 1, max: max as u64 }),
        };
        in_range("dimension", self.dimension, DIMENSION_MAX)?;
        in_range("entries_max", self.entries_max, ENTRIES_MAX)?;
        in_range("scanned_entries", self.scanned_entries, ENTRIES_MAX)?;
        let number = |name, value, accepted| Err(HistoryError::Number { name, value, accepted });
        match (self.alpha, self.decay_s) {
            (alpha, _) if !(0.0..=1.0).contains(&alpha) => number("alpha", alpha.into(), "0 to 1"),
            (_, decay_s) if !decay_s.is_finite() || decay_s <= 0.0 => {
                number("decay_s", decay_s, "a finite number above 0")
            }
            _ => Ok(()),
        }
    }

    const fn weighing(&self) -> Weighing {
        Weighing { alpha: self.alpha, decay_s: self.decay_s }
    }
}

impl Dialogue {
    /// Makes an empty dialogue in memory alone.
    ///
    /// # Errors
    /// `Range`, `Number`.
    pub fn new(options: DialogueOptions) -> Result<Self, HistoryError> {
        options.check()?;
        Ok(Self::over(options, None))
    }

    pub(crate) fn over(options: DialogueOptions, log: Option<Log>) -> Self {
        let state = RwLock::new(State::new(options.dimension));
        let writer = Mutex::new(Writer { log, next_id: 0, forgotten: 0, unlogged: Vec::new() });
        Self { options, writer, state, torn: None, _dir: None }
    }

    /// Opens the dialogue of a directory, which it has to itself, and makes it if it is missing. A log that ends
    /// within its last record is cut there, and [`Dialogue::torn`] says so.
    ///
    /// # Errors
    /// `Range`, `Number`, `File`, `InUse`; `Damaged` for a log that is damaged before its last record, of another
    /// version or dimension: it stays as it is.
    pub fn open(options: DialogueOptions, dir: &Path) -> Result<Self, HistoryError> {
        options.check()?;
        let dir_lock = HistoryDir::lock(dir)?;
        let (log, contents) = Log::open(dir, options.dimension, options.synced)?;
        let mut own = Self::over(options, Some(log));
        own._dir = Some(dir_lock);
        own.torn = contents.torn;
        let (state, writer) = (own.state.get_mut(), own.writer.get_mut());
        writer.next_id = contents.next_id;
        for (entry, embedding) in contents.entries.into_values() {
            state.insert(entry, &embedding);
        }
        // Fewer may be kept than before, and a crash may have come before a record of what is forgotten.
        let surplus = state.surplus(own.options.weighing(), &[], own.options.entries_max);
        writer.forget(state, &surplus, own.options.dimension);
        writer.unlogged = surplus;
        if let Some(index) = state.index.rebuilt() {
            state.index = index;
        }
        Ok(own)
    }

    /// Returns the settings.
    #[must_use]
    pub const fn options(&self) -> &DialogueOptions {
        &self.options
    }

    /// Returns what was cut off the end of the log when it was opened, if anything was.
    #[must_use]
    pub fn torn(&self) -> Option<&str> {
        self.torn.as_deref()
    }

    /// Records entries in their order and returns the id of the first; the others count up from it. Beyond
    /// [`DialogueOptions::entries_max`] the entries of the least weight for the last of these queries are forgotten,
    /// the earlier ones of equal weight first. Now and then it rebuilds the levels, in twice the memory.
    ///
    /// # Errors
    /// `Length`, `Number`, `Limit`, `File`. Nothing is recorded then.
    pub fn record(&self, entries: &[NewEntry<'_>]) -> Result<u64, HistoryError> {
        if entries.len() > RECORDED_ENTRIES_MAX {
            return Err(HistoryError::Length {
                name: "entries",
                length: entries.len(),
                min: 0,
                max: RECORDED_ENTRIES_MAX,
                unit: "entries",
            });
        }
        entries.iter().try_for_each(|it| it.check(self.options.dimension))?;
        let mut writer = self.writer.lock();
        let first = writer.next_id;
        let next_id = first + entries.len() as u64;
        if next_id > ENTRY_IDS_MAX {
            return Err(HistoryError::Limit { what: "entries ever recorded", max: ENTRY_IDS_MAX });
        }
        let mut new = Vec::with_capacity(entries.len());
        for (id, it) in (first..).zip(entries) {
            let mut embedding = it.embedding.to_vec();
            normalise(&mut embedding);
            new.push((it.entry(id), embedding));
        }
        let rows: Vec<Row<'_>> = new
            .iter()
            .map(|(entry, embedding)| Row { id: entry.id, time_s: entry.time_s, embedding })
            .collect();
        let most = self.options.entries_max;
        let surplus = self.state.read().surplus(self.options.weighing(), &rows, most);
        drop(rows);
        let Writer { log, unlogged, .. } = &mut *writer;
        if let Some(log) = log {
            let forgotten = [unlogged.as_slice(), &surplus].concat();
            log.append(&new, &forgotten)?;
            unlogged.clear();
        }
        writer.next_id = next_id;
        let mut new = new.into_iter().peekable();
        while new.peek().is_some() {
            // Retrievals go on between these.
            let mut state = self.state.write();
            for (entry, embedding) in new.by_ref().take(INSERTED_ENTRIES) {
                state.insert(entry, &embedding);
            }
        }
        writer.forget(&mut self.state.write(), &surplus, self.options.dimension);
        // Nobody else writes meanwhile, and retrievals go on.
        let rebuilt = self.state.read().index.rebuilt();
        if let Some(index) = rebuilt {
            self.state.write().index = index;
        }
        if let Some(log) = &mut writer.log {
            log.shorten(&self.state.read(), next_id, self.options.dimension);
        }
        Ok(first)
    }

    /// Returns at most `count` entries of the greatest weight for a query at `now_s`, the greatest first; of equal
    /// ones the later first. Besides the entries near the query, the last ones are looked at.
    ///
    /// # Errors
    /// `Length`, `Number`; `Range` for a `count` above [`RETRIEVED_MAX`].
    pub fn retrieve(
        &self,
        embedding: &[f32],
        now_s: f64,
        count: usize,
    ) -> Result<Vec<Found>, HistoryError> {
        let query = self.query(embedding, now_s, count, RETRIEVED_MAX)?;
        let state = self.state.read();
        let scanned = self.options.scanned_entries;
        let search = Search { query: &query, now_s, count, scanned, without: &[] };
        Ok(state.found(&state.search(self.options.weighing(), search)))
    }

    /// Returns a chain of at most `count` entries: the most relevant one to the query, then the most relevant one to
    /// both, and so on, without those before. It ends before a relevance below [`CHAIN_RELEVANCE_MIN`]. The embedding
    /// of several queries is the direction of the sum of theirs. Weights are as in [`Dialogue::retrieve`].
    ///
    /// # Errors
    /// `Length`, `Number`; `Range` for a `count` above [`CHAIN_ENTRIES_MAX`].
    pub fn chain(
        &self,
        embedding: &[f32],
        now_s: f64,
        count: usize,
    ) -> Result<Vec<Found>, HistoryError> {
        let mut sum = self.query(embedding, now_s, count, CHAIN_ENTRIES_MAX)?;
        let state = self.state.read();
        let by_relevance = Weighing { alpha: 1.0, ..self.options.weighing() };
        let (mut chain, mut ids): (Vec<Scored>, Vec<u64>) = (Vec::new(), Vec::new());
        while chain.len() < count {
            let mut query = sum.clone();
            normalise(&mut query);
            let scanned = self.options.scanned_entries;
            let search = Search { query: &query, now_s, count: 1, scanned, without: &ids };
            let best = state.search(by_relevance, search);
            let Some(best) = best.first().filter(|it| it.relevance >= CHAIN_RELEVANCE_MIN) else {
                break;
            };
            let Some(row) = state.index.get(best.id) else { break };
            chain.push(self.options.weighing().score(&query, now_s, row));
            ids.push(best.id);
            sum.iter_mut().zip(row.embedding).for_each(|(own, it)| *own += it);
        }
        Ok(state.found(&chain))
    }

    /// Returns an entry, if it is there.
    pub fn entry(&self, id: u64) -> Option<Arc<Entry>> {
        self.state.read().entries.get(&id).cloned()
    }

    /// Returns figures.
    pub fn stats(&self) -> DialogueStats {
        let writer = self.writer.lock();
        let state = self.state.read();
        let (categories, summaries) = state.index.levels();
        DialogueStats {
            entries: state.entries.len() as u64,
            forgotten_entries: writer.forgotten,
            categories: categories as u64,
            summaries: summaries as u64,
            log_bytes: writer.log.as_ref().map_or(0, Log::bytes),
        }
    }

    fn query(
        &self,
        embedding: &[f32],
        now_s: f64,
        count: usize,
        max: usize,
    ) -> Result<Vec<f32>, HistoryError> {
        check_embedding(embedding, self.options.dimension)?;
        check_finite("now_s", now_s)?;
        if count > max {
            let (value, max) = (count as u64, max as u64);
            return Err(HistoryError::Range { name: "count", value, min: 0, max });
        }
        let mut query = embedding.to_vec();
        normalise(&mut query);
        Ok(query)
    }
}

impl Writer {
    fn forget(&mut self, state: &mut State, ids: &[u64], dimension: usize) {
        for entry in ids.iter().filter_map(|id| state.remove(*id)) {
            self.forgotten += 1;
            if let Some(log) = &mut self.log {
                log.count_forgotten(entry_bytes(&entry, dimension));
            }
        }
    }
}

impl State {
    fn found(&self, scored: &[Scored]) -> Vec<Found> {
        let found = |it: &Scored| {
            let entry = Arc::clone(self.entries.get(&it.id)?);
            let Scored { weight, relevance, recency, .. } = *it;
            Some(Found { entry, weight, relevance, recency })
        };
        scored.iter().filter_map(found).collect()
    }
}
