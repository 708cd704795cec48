//! Token ids as C passes them.

use std::ffi::c_void;

use dormouse_history::HistoryError;

use crate::boundary::{In, usize_of};
use crate::fault::Fault;

/// Token ids of one width.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ids<'a> {
    Narrow(&'a [i32]),
    Wide(&'a [i64]),
}

impl<'a> Ids<'a> {
    /// # Safety
    /// `pointer` is NULL or readable for `count` ids of `id_bytes` bytes that do not change during `'a`.
    pub(crate) unsafe fn new(
        pointer: *const c_void,
        id_bytes: u32,
        count: u64,
        name: &str,
    ) -> Result<Self, Fault> {
        let count = usize_of(count, name)?;
        match id_bytes {
            // SAFETY: the caller's contract.
            4 => Ok(Self::Narrow(unsafe { In::slice(pointer.cast(), count, name) }?)),
            // SAFETY: the caller's contract.
            8 => Ok(Self::Wide(unsafe { In::slice(pointer.cast(), count, name) }?)),
            _ => Err(Fault::argument(format!(
                "id_bytes is {id_bytes}; accepted: 4 (int32_t), 8 (int64_t)"
            ))),
        }
    }

    /// Returns the last ids, at most `most`, each below `vocab`.
    pub(crate) fn last_below(
        self,
        most: usize,
        vocab: u32,
        name: &'static str,
    ) -> Result<Vec<u32>, HistoryError> {
        match self {
            Self::Narrow(ids) => last_below(ids, most, vocab, name),
            Self::Wide(ids) => last_below(ids, most, vocab, name),
        }
    }
}

fn last_below<T: Copy + Into<i64>>(
    ids: &[T],
    most: usize,
    vocab: u32,
    name: &'static str,
) -> Result<Vec<u32>, HistoryError> {
    let one = |(index, id): (usize, &T)| {
        let id: i64 = (*id).into();
        let refused = HistoryError::Id { name, index, id, max: vocab - 1 };
        u32::try_from(id).ok().filter(|it| *it < vocab).ok_or(refused)
    };
    ids.iter().enumerate().skip(ids.len().saturating_sub(most)).map(one).collect()
}
