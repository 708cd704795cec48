//! Transfers against a disk that answers in any order, with whatever it likes.

use std::io;

use proptest::prelude::*;

use super::*;

/// What the disk makes of one request.
#[derive(Clone, Copy, Debug)]
enum Deed {
    All,
    /// A transfer of this number of bytes.
    Some(usize),
    Interrupted,
    Error(i32),
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        12 => Just(Deed::All),
        3 => (0..CHUNK_BYTES).prop_map(Deed::Some),
        2 => (0..CHUNK_BYTES / UNIT_BYTES).prop_map(|units| Deed::Some(units * UNIT_BYTES)),
        2 => Just(Deed::Interrupted),
        1 => prop_oneof![Just(libc::EIO), Just(libc::ENOSPC)].prop_map(Deed::Error),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn a_transfer_is_whole_or_says_why_not(
        is_write in any::<bool>(),
        units in 1..3 * CHUNK_BYTES / UNIT_BYTES,
        depth in 1..5_usize,
        deeds in prop::collection::vec((deed(), any::<prop::sample::Index>()), 1..200),
        cancel_at in prop::option::weighted(0.1, 0..6_usize),
    ) {
        let bytes = units * UNIT_BYTES;
        let mut buffer = Aligned::zeroed(bytes).unwrap();
        let memory = buffer.memory();
        let extent = 7 * UNIT_BYTES as u64;
        let mut transfer = match is_write {
            true => Transfer::writer(extent, memory, false),
            false => Transfer::reader(extent, memory, Vec::new()),
        };
        let mut moved = vec![false; units];
        let mut unanswered: Vec<(u32, Request)> = Vec::new();
        let mut errors = Vec::new();
        let (mut deeds, mut answers, mut was_short) = (deeds.into_iter(), 0, false);
        loop {
            if cancel_at == Some(answers) {
                transfer.cancel();
            }
            if unanswered.len() < depth && let Some((chunk, request)) = transfer.next_request() {
                let at = (request.offset - extent) as usize;
                prop_assert_eq!(request.memory.address(), memory.address() + at);
                prop_assert!(request.memory.bytes() > 0 && at + request.memory.bytes() <= bytes);
                prop_assert!(at.is_multiple_of(UNIT_BYTES));
                prop_assert!(request.memory.bytes().is_multiple_of(UNIT_BYTES));
                prop_assert_eq!(at / CHUNK_BYTES, chunk as usize);
                prop_assert!(unanswered.iter().all(|(asked, _)| *asked != chunk));
                unanswered.push((chunk, request));
                continue;
            }
            if unanswered.is_empty() {
                break;
            }
            prop_assert!(!transfer.is_over());
            let (deed, at) = deeds.next().map_or((Deed::All, 0), |(deed, index)| {
                (deed, index.index(unanswered.len()))
            });
            let (chunk, request) = unanswered.swap_remove(at);
            let asked = request.memory.bytes();
            let result = match deed {
                Deed::All => Ok(asked),
                Deed::Some(n) => Ok(n.min(asked)),
                Deed::Interrupted => Err(io::ErrorKind::Interrupted.into()),
                Deed::Error(errno) => Err(io::Error::from_raw_os_error(errno)),
            };
            if let Ok(n) = &result {
                was_short |= *n < asked;
                let first = (request.offset - extent) as usize / UNIT_BYTES;
                moved[first..first + n / UNIT_BYTES].fill(true);
            }
            if let Deed::Error(errno) = deed {
                errors.push(errno);
            }
            transfer.answer(chunk, result);
            answers += 1;
        }
        prop_assert!(transfer.is_over());
        match transfer.outcome() {
            Ok(sums) => {
                prop_assert!(moved.iter().all(|moved| *moved), "said whole, and is not");
                prop_assert!(sums.is_none() && errors.is_empty());
            }
            Err(NvmeError::Failed { code, .. }) => prop_assert_eq!(Some(&code), errors.first()),
            Err(NvmeError::Truncated { .. }) => prop_assert!(!is_write && was_short),
            Err(NvmeError::Short { .. }) => prop_assert!(answers >= SHORT_ATTEMPTS_MAX as usize),
            Err(NvmeError::Cancelled) => prop_assert!(cancel_at.is_some()),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn an_interrupted_chunk_is_repeated_up_to_the_limit() {
    let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
    let mut transfer = Transfer::writer(0, buffer.memory(), true);
    let mut asked = 0;
    while let Some((chunk, _)) = transfer.next_request() {
        asked += 1;
        transfer.answer(chunk, Err(io::ErrorKind::Interrupted.into()));
    }
    assert_eq!(asked, SHORT_ATTEMPTS_MAX);
    let error = transfer.outcome().unwrap_err();
    assert!(matches!(error, NvmeError::Short { done_bytes: 0, attempts: 64, .. }), "{error}");
}

/// An error of the disk is reported even if the transfer was cancelled.
#[test]
fn an_error_after_a_cancel_is_not_swallowed() {
    let mut buffer = Aligned::zeroed(2 * CHUNK_BYTES).unwrap();
    let mut transfer = Transfer::writer(0, buffer.memory(), false);
    let asked: Vec<u32> =
        std::iter::from_fn(|| transfer.next_request().map(|(chunk, _)| chunk)).collect();
    transfer.cancel();
    transfer.answer(asked[0], Ok(CHUNK_BYTES));
    transfer.answer(asked[1], Err(io::Error::from_raw_os_error(libc::EIO)));
    assert!(transfer.is_over());
    let outcome = transfer.outcome();
    assert!(matches!(outcome, Err(NvmeError::Failed { .. })), "{outcome:?}");
}
