//! Entries in memory, and their weights.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::entry::Entry;
use super::index::{Index, Row};
use super::vectors::dot;
use crate::limits::RECENT_ENTRIES;

/// How entries are weighed: α and the decay of recency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighing {
    pub(crate) alpha: f32,
    pub(crate) decay_s: f64,
}

/// An entry and its weight for a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scored {
    pub(crate) id: u64,
    pub(crate) weight: f32,
    pub(crate) relevance: f32,
    pub(crate) recency: f32,
}

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search<'a> {
    /// An embedding of length 1, or zeros.
    pub(crate) query: &'a [f32],
    pub(crate) now_s: f64,
    pub(crate) count: usize,
    /// Entries to look at, at least.
    pub(crate) scanned: usize,
    /// Entries to leave out.
    pub(crate) without: &'a [u64],
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) entries: BTreeMap<u64, Arc<Entry>>,
    pub(crate) index: Index,
}

impl Weighing {
    pub(crate) fn score(self, query: &[f32], now_s: f64, row: Row<'_>) -> Scored {
        let relevance = dot(query, row.embedding);
        let age_s = (now_s - row.time_s).max(0.0);
        let recency = (-age_s / self.decay_s).exp() as f32;
        let weight = self.alpha * relevance + (1.0 - self.alpha) * recency;
        Scored { id: row.id, weight, relevance, recency }
    }
}

impl State {
    pub(crate) fn new(dimension: usize) -> Self {
        Self { entries: BTreeMap::new(), index: Index::new(dimension) }
    }

    /// Inserts an entry with its embedding, of length 1 or zeros.
    pub(crate) fn insert(&mut self, entry: Entry, embedding: &[f32]) {
        self.index.insert(Row { id: entry.id, time_s: entry.time_s, embedding });
        self.entries.insert(entry.id, Arc::new(entry));
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Arc<Entry>> {
        self.index.remove(id);
        self.entries.remove(&id)
    }

    /// Returns the entries of the greatest weight, the greatest first; of equal ones the later first. Besides the
    /// entries near the query, the last ones are looked at.
    pub(crate) fn search(&self, weighing: Weighing, search: Search<'_>) -> Vec<Scored> {
        let last = || self.entries.keys().rev().take(RECENT_ENTRIES);
        let everything = search.scanned >= self.entries.len();
        let first = || self.entries.keys().nth_back(RECENT_ENTRIES - 1).copied().unwrap_or(0);
        let recent_from = if everything { u64::MAX } else { first() };
        let near = self.index.near(search.query, search.scanned);
        let near = near.filter(|row| row.id < recent_from);
        let recent = last().filter(|_| !everything).filter_map(|id| self.index.get(*id));
        let rows = near.chain(recent).filter(|row| !search.without.contains(&row.id));
        let mut found: Vec<Scored> =
            rows.map(|row| weighing.score(search.query, search.now_s, row)).collect();
        if search.count < found.len() && search.count > 0 {
            found.select_nth_unstable_by(search.count - 1, best_first);
        }
        found.truncate(search.count);
        found.sort_unstable_by(best_first);
        found
    }

    /// Returns the entries that are to be forgotten once `new` ones are inserted, so that `most` remain: those of the
    /// least weight for the query of the last one, at its time.
    pub(crate) fn surplus(&self, weighing: Weighing, new: &[Row<'_>], most: usize) -> Vec<u64> {
        let count = (self.entries.len() + new.len()).saturating_sub(most);
        let latest = new.last().copied().or_else(|| {
            let (id, _) = self.entries.last_key_value()?;
            self.index.get(*id)
        });
        let (Some(latest), 1..) = (latest, count) else { return Vec::new() };
        let rows = self.index.rows().chain(new.iter().copied());
        let score = |row| weighing.score(latest.embedding, latest.time_s, row);
        let mut all: Vec<Scored> = rows.map(score).collect();
        let kept = all.len() - count;
        if kept > 0 {
            all.select_nth_unstable_by(kept - 1, best_first);
        }
        let mut surplus: Vec<u64> = all.iter().skip(kept).map(|it| it.id).collect();
        surplus.sort_unstable();
        surplus
    }
}

fn best_first(a: &Scored, b: &Scored) -> Ordering {
    b.weight.total_cmp(&a.weight).then(b.id.cmp(&a.id))
}
