//! Three levels of embeddings: categories, their summaries, the entries of each.

use std::collections::HashMap;

use super::kmeans::{cluster, nearest};
use super::vectors::dot;

/// Entries from which on there is more than one summary.
const LEVELS_ENTRIES_MIN: usize = 1024;
/// Entries of a summary on average.
const SUMMARY_ENTRIES: usize = 64;
/// Most summaries of a category, over those of one on average: of entries that are all alike, which are one category,
/// levels would take time quadratic in them.
const SUMMARIES_OVER_MEAN_MAX: usize = 4;
/// Categories among whose summaries an entry's is chosen.
const CATEGORIES_OF_ENTRY: usize = 6;
/// Of the categories, the share whose summaries are looked at.
const CATEGORIES_SHARE: usize = 2;
/// Fewest categories whose summaries are looked at.
const CATEGORIES_MIN: usize = 8;

/// An embedding of length 1, or zeros, and what is weighed with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row<'a> {
    pub(crate) id: u64,
    pub(crate) time_s: f64,
    pub(crate) embedding: &'a [f32],
}

/// The embeddings of all entries.
#[derive(Debug)]
pub(crate) struct Index {
    dimension: usize,
    categories: Vec<Category>,
    places: HashMap<u64, Place>,
    /// Entries that were inserted since the levels were built, and entries then.
    inserted: usize,
    built: usize,
}

#[derive(Debug)]
struct Category {
    centroid: Vec<f32>,
    summaries: Vec<Summary>,
}

#[derive(Debug, Default)]
struct Summary {
    centroid: Vec<f32>,
    keys: Vec<(u64, f64)>,
    embeddings: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    category: usize,
    summary: usize,
    row: usize,
}

impl Index {
    pub(crate) fn new(dimension: usize) -> Self {
        let centroid = vec![0.0; dimension];
        let summary = Summary { centroid: centroid.clone(), ..Summary::default() };
        let categories = vec![Category { centroid, summaries: vec![summary] }];
        Self { dimension, categories, places: HashMap::new(), inserted: 0, built: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of categories and of summaries.
    pub(crate) fn levels(&self) -> (usize, usize) {
        (self.categories.len(), self.categories.iter().map(|it| it.summaries.len()).sum())
    }

    pub(crate) fn insert(&mut self, row: Row<'_>) {
        let (category, summary) = self.summary_of(row.embedding);
        let own = &mut self.categories[category].summaries[summary];
        self.places.insert(row.id, Place { category, summary, row: own.keys.len() });
        own.keys.push((row.id, row.time_s));
        own.embeddings.extend_from_slice(row.embedding);
        self.inserted += 1;
    }

    pub(crate) fn remove(&mut self, id: u64) {
        let Some(place) = self.places.remove(&id) else { return };
        let own = &mut self.categories[place.category].summaries[place.summary];
        let last = own.keys.len() - 1;
        own.keys.swap_remove(place.row);
        own.embeddings.copy_within(last * self.dimension.., place.row * self.dimension);
        own.embeddings.truncate(last * self.dimension);
        if let Some((moved, _)) = own.keys.get(place.row) {
            self.places.insert(*moved, place);
        }
    }

    pub(crate) fn get(&self, id: u64) -> Option<Row<'_>> {
        let place = self.places.get(&id)?;
        self.categories[place.category].summaries[place.summary].row(place.row, self.dimension)
    }

    /// Returns every row, in no order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.summaries().flat_map(|it| it.rows(self.dimension))
    }

    /// Returns the rows of the summaries that are nearest to a query, the nearest ones first, until there are
    /// `rows_min`; all if there are no more.
    pub(crate) fn near(&self, query: &[f32], rows_min: usize) -> impl Iterator<Item = Row<'_>> {
        let chosen = match rows_min >= self.len() {
            true => self.summaries().collect(),
            false => self.nearest(query, rows_min),
        };
        chosen.into_iter().flat_map(|it| it.rows(self.dimension))
    }

    /// Returns an index with new levels, if these are of less than half of the entries, or all entries are others since.
    pub(crate) fn rebuilt(&self) -> Option<Self> {
        if self.inserted < self.built.max(LEVELS_ENTRIES_MIN) || self.len() < LEVELS_ENTRIES_MIN {
            return None;
        }
        let mut new = Self::new(self.dimension);
        let mut rows: Vec<Row<'_>> = self.rows().collect();
        rows.sort_unstable_by_key(|row| row.id);
        let summaries = rows.len() / SUMMARY_ENTRIES;
        let categories = summaries.isqrt();
        let most = SUMMARIES_OVER_MEAN_MAX * categories;
        let groups = grouped(&rows, categories);
        new.categories = groups
            .into_iter()
            .map(|(centroid, members)| {
                let own = grouped(&members, (members.len() / SUMMARY_ENTRIES).min(most));
                let summary = |(centroid, _)| Summary { centroid, ..Summary::default() };
                Category { centroid, summaries: own.into_iter().map(summary).collect() }
            })
            .collect();
        for row in &rows {
            new.insert(*row);
        }
        (new.inserted, new.built) = (0, rows.len());
        Some(new)
    }

    /// Returns the category and the summary that are nearest to an embedding. What sets an entry apart from its topic
    /// may lead to another category, so several are looked at.
    fn summary_of(&self, embedding: &[f32]) -> (usize, usize) {
        let mut categories: Vec<(f32, usize)> =
            self.categories.iter().map(|it| dot(embedding, &it.centroid)).zip(0..).collect();
        categories.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut best = (f32::NEG_INFINITY, (0, 0));
        for &(_, category) in categories.iter().take(CATEGORIES_OF_ENTRY) {
            let summaries = self.categories[category].summaries.iter();
            let (summary, cosine) = nearest(embedding, summaries.map(|it| it.centroid.as_slice()));
            if cosine > best.0 {
                best = (cosine, (category, summary));
            }
        }
        best.1
    }

    fn summaries(&self) -> impl Iterator<Item = &Summary> {
        self.categories.iter().flat_map(|it| &it.summaries)
    }

    fn nearest(&self, query: &[f32], rows_min: usize) -> Vec<&Summary> {
        let categories = ranked(self.categories.iter(), |it| dot(query, &it.centroid));
        let looked_at = (categories.len() / CATEGORIES_SHARE).max(CATEGORIES_MIN);
        let (first, rest) = categories.split_at(looked_at.min(categories.len()));
        let all = first.iter().flat_map(|it| &it.summaries);
        let mut rows = 0;
        let mut chosen = ranked(all, |it| dot(query, &it.centroid));
        let beyond = |summary: &&Summary| {
            let enough = rows >= rows_min;
            rows += summary.keys.len();
            enough
        };
        let end = chosen.iter().position(beyond);
        match end {
            Some(end) => chosen.truncate(end),
            None => {
                for summary in rest.iter().flat_map(|it| &it.summaries) {
                    if rows >= rows_min {
                        break;
                    }
                    rows += summary.keys.len();
                    chosen.push(summary);
                }
            }
        }
        chosen
    }
}

impl Summary {
    fn row(&self, row: usize, dimension: usize) -> Option<Row<'_>> {
        let (id, time_s) = *self.keys.get(row)?;
        let embedding = self.embeddings.get(row * dimension..(row + 1) * dimension)?;
        Some(Row { id, time_s, embedding })
    }

    fn rows(&self, dimension: usize) -> impl Iterator<Item = Row<'_>> {
        let embeddings = self.embeddings.chunks_exact(dimension);
        let row = |(&(id, time_s), embedding)| Row { id, time_s, embedding };
        self.keys.iter().zip(embeddings).map(row)
    }
}

/// Returns at most `count` directions with the rows that are nearest to each.
fn grouped<'a>(rows: &[Row<'a>], count: usize) -> Vec<(Vec<f32>, Vec<Row<'a>>)> {
    let embeddings: Vec<&[f32]> = rows.iter().map(|row| row.embedding).collect();
    let centroids = cluster(&embeddings, count);
    let mut groups: Vec<_> = centroids.into_iter().map(|it| (it, Vec::new())).collect();
    for row in rows {
        let (group, _) = nearest(row.embedding, groups.iter().map(|it| it.0.as_slice()));
        groups[group].1.push(*row);
    }
    groups.retain(|(_, members)| !members.is_empty());
    groups
}

fn ranked<'a, T>(all: impl Iterator<Item = &'a T>, score: impl Fn(&T) -> f32) -> Vec<&'a T> {
    let mut all: Vec<(f32, &T)> = all.map(|it| (score(it), it)).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    all.into_iter().map(|(_, it)| it).collect()
}
