//! What a campaign did, and what befell it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Counts by name.
type Counts = BTreeMap<String, u64>;

/// Figures of the sequences that ended well.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sequences: u64,
    pub(crate) operations: u64,
    /// How long the longest took, and of which seed it was.
    pub(crate) longest: (Duration, u64),
    /// Faults that befell something; not those that nothing came by.
    fired: Counts,
    /// What the engine did.
    done: Counts,
    /// Errors that callers got, by name.
    errors: Counts,
}

impl Tally {
    pub(crate) fn fired(&mut self, what: &str, count: u64) {
        *self.fired.entry(what.to_owned()).or_insert(0) += count;
    }

    pub(crate) fn done(&mut self, what: &str, count: u64) {
        *self.done.entry(what.to_owned()).or_insert(0) += count;
    }

    pub(crate) fn error(&mut self, name: &str) {
        *self.errors.entry(name.to_owned()).or_insert(0) += 1;
    }

    /// A fault that never befell anything says nothing about what would become of it.
    pub(crate) fn assert_all_fired(&self) {
        for (what, &count) in self.fired.iter().chain(&self.done) {
            assert!(count > 0, "{what} never happened: {self}");
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (took, seed) = self.longest;
        write!(f, "{} sequences, {} operations", self.sequences, self.operations)?;
        writeln!(f, ", the longest {took:?} (seed {seed})")?;
        for (title, counts) in
            [("fired", &self.fired), ("done", &self.done), ("errors", &self.errors)]
        {
            write!(f, "  {title}:")?;
            for (what, count) in counts {
                write!(f, " {what} {count};")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
