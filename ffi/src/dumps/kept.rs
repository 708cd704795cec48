//! Which dumps of a process stay: the first of each reason, and the last.

use std::collections::VecDeque;
use std::path::PathBuf;

use super::reason::Reason;

/// The dumps of one reason that are in the directory.
#[derive(Debug, Default)]
pub(super) struct Kept {
    attempts: u64,
    /// The paths of each dump, one for each device, oldest first.
    dumps: VecDeque<Vec<PathBuf>>,
}

impl Kept {
    /// Counts an attempt. `false`: there have been too many.
    pub(super) fn attempt(&mut self, reason: Reason) -> bool {
        self.attempts += 1;
        self.attempts <= reason.attempts_max()
    }

    /// Adds a dump that has been written. Returns the paths of the one that it replaces: the oldest but the first, which
    /// shows what came before all others.
    pub(super) fn add(&mut self, reason: Reason, paths: Vec<PathBuf>) -> Vec<PathBuf> {
        self.dumps.push_back(paths);
        let is_full = self.dumps.len() > reason.dumps_max();
        if is_full { self.dumps.remove(1).unwrap_or_default() } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_dump_and_the_last_stay() {
        let mut kept = Kept::default();
        let path = |number: u64| vec![PathBuf::from(number.to_string())];
        let most = Reason::OutOfMemory.dumps_max() as u64;
        let replaced: Vec<_> =
            (0..most + 3).map(|number| kept.add(Reason::OutOfMemory, path(number))).collect();
        assert!(replaced[..most as usize].iter().all(Vec::is_empty));
        assert_eq!(replaced[most as usize..], [path(1), path(2), path(3)]);
    }

    #[test]
    fn attempts_are_limited_whether_they_succeed_or_not() {
        let mut kept = Kept::default();
        let attempts =
            (0..Reason::OutOfMemory.attempts_max()).filter(|_| kept.attempt(Reason::OutOfMemory));
        assert_eq!(attempts.count() as u64, Reason::OutOfMemory.attempts_max());
        assert!(!kept.attempt(Reason::OutOfMemory));
    }
}
