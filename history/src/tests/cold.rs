//! Prompts that memory has no room for.

use std::sync::Arc;
use std::thread;

use dormouse_storage::Nvme;
use dormouse_storage::testing::Faults;

use super::{Dir, VOCAB};
use crate::cold::Cold;
use crate::{Digest, History, Options};

const FILE_BYTES: u64 = 1 << 20;

fn record(history: &History, prompts: u32) {
    for prompt in 0..prompts {
        let response: Vec<u32> = (0..50).map(|it| (prompt + 3 * it) % VOCAB).collect();
        history.record(&[prompt], &response, 0.0, 0).unwrap();
    }
}

fn is_drafted(history: &History, prompt: u32) -> bool {
    let end = [prompt, prompt + 3, prompt + 6];
    history.draft(Digest::of(&[prompt]), &end, 1).unwrap().tokens == [prompt + 9]
}

fn with_faults(faults: &Arc<Faults>, budget_bytes: u64) -> History {
    let nvme = Nvme::with_storage(Arc::<Faults>::clone(faults), FILE_BYTES, true);
    let options = Options { budget_bytes, ..Options::of_vocab(VOCAB) };
    History::over(options, Some(Cold::over(nvme)))
}

#[test]
fn prompts_beyond_the_budget_are_in_the_file_and_come_back() {
    let dir = Dir::new();
    let cold = Some((dir.0.clone(), FILE_BYTES));
    let history = History::new(Options { budget_bytes: 4 << 10, cold, ..Options::of_vocab(VOCAB) });
    let history = history.unwrap();
    record(&history, 40);
    let stats = history.stats();
    assert!(stats.bytes <= 4 << 10 && stats.prompts >= 4, "{stats:?}");
    assert_eq!(stats.prompts + stats.cold_prompts, 40);
    assert!(stats.cold_bytes >= 4096 * stats.cold_prompts && stats.forgotten_prompts == 0);
    for prompt in 0..40 {
        assert!(is_drafted(&history, prompt), "{prompt}");
    }
    assert!(history.stats().bytes <= 4 << 10);
    // A record of a cold prompt adds to what it has.
    history.record(&[0], &[700, 701, 702, 703], 0.0, 0).unwrap();
    assert!(is_drafted(&history, 0));
    for prompt in 0..40 {
        assert!(history.forget(Digest::of(&[prompt])));
    }
    let stats = history.stats();
    assert_eq!((stats.prompts, stats.bytes, stats.cold_prompts, stats.cold_bytes), (0, 0, 0, 0));
}

#[test]
fn the_least_recently_used_prompt_leaves_first() {
    let history = with_faults(&Arc::new(Faults::in_memory(FILE_BYTES)), u64::MAX);
    record(&history, 3);
    assert!(is_drafted(&history, 0));
    let one = history.stats().bytes / 3;
    history.release(2 * one);
    assert_eq!((history.stats().prompts, history.stats().cold_prompts), (2, 1));
    // Without reads a cold prompt stays where it is.
    history.release(2 * one);
    assert!(is_drafted(&history, 0) && history.stats().cold_prompts == 1, "prompt 1 left");
}

#[test]
fn a_budget_of_zero_keeps_all_prompts_in_the_file() {
    let history = with_faults(&Arc::new(Faults::in_memory(FILE_BYTES)), 0);
    record(&history, 5);
    assert_eq!((history.stats().prompts, history.stats().bytes), (0, 0));
    assert!((0..5).all(|prompt| is_drafted(&history, prompt)));
    assert_eq!(history.stats().cold_prompts, 5);
}

#[test]
fn without_a_file_prompts_beyond_the_budget_are_forgotten() {
    let history = History::new(Options { budget_bytes: 0, ..Options::of_vocab(VOCAB) }).unwrap();
    record(&history, 5);
    let stats = history.stats();
    assert_eq!((stats.prompts, stats.bytes, stats.forgotten_prompts), (0, 0, 5));
    assert!(!is_drafted(&history, 0));
}

#[test]
fn a_full_disk_forgets_prompts_and_says_why() {
    const ENOSPC: i32 = 28;
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let history = with_faults(&faults, u64::MAX);
    record(&history, 4);
    faults.fail_writes_after(0, ENOSPC);
    history.release(0);
    let stats = history.stats();
    assert_eq!((stats.bytes, stats.cold_prompts, stats.forgotten_prompts), (0, 0, 4));
    assert_eq!(stats.cold_bytes, 0, "a failed write holds no place");
    let reason = history.cold_failure().unwrap();
    assert!(reason.contains("No space left") || reason.contains("code 28"), "{reason}");
    record(&history, 1);
    assert!(is_drafted(&history, 0));
}

#[test]
fn a_full_file_forgets_prompts() {
    let nvme = Nvme::with_storage(Arc::new(Faults::in_memory(8192)), 8192, true);
    let options = Options { budget_bytes: 0, ..Options::of_vocab(VOCAB) };
    let history = History::over(options, Some(Cold::over(nvme)));
    record(&history, 5);
    let stats = history.stats();
    assert_eq!((stats.cold_prompts, stats.forgotten_prompts), (2, 3));
    assert!(history.cold_failure().unwrap().contains("no room"));
}

#[test]
fn a_prompt_that_cannot_be_read_is_forgotten() {
    const EIO: i32 = 5;
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let history = with_faults(&faults, 0);
    record(&history, 2);
    faults.fail_reads(EIO);
    assert!(!is_drafted(&history, 0));
    faults.heal();
    assert!(!is_drafted(&history, 0) && is_drafted(&history, 1));
    let stats = history.stats();
    assert_eq!((stats.forgotten_prompts, stats.cold_prompts), (1, 1));
    assert!(history.cold_failure().is_some());
}

#[test]
fn a_save_forgets_a_prompt_that_cannot_be_read_and_saves_the_rest() {
    const EIO: i32 = 5;
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let history = with_faults(&faults, 0);
    record(&history, 3);
    faults.fail_next_reads(1, EIO);
    history.save(&path).unwrap();
    assert_eq!((history.stats().forgotten_prompts, history.stats().cold_prompts), (1, 2));
    assert!(history.cold_failure().is_some());
    let loaded = super::history();
    loaded.load(&path).unwrap();
    assert_eq!(loaded.stats().prompts, 2);
    assert!(is_drafted(&loaded, 1) && is_drafted(&loaded, 2), "the first one was read first");
}

#[test]
fn a_cold_prompt_takes_the_place_of_another_in_a_full_file() {
    const FILE_BYTES: u64 = 2 << 12;
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let nvme = Nvme::with_storage(Arc::<Faults>::clone(&faults), FILE_BYTES, true);
    let one = {
        let history = super::history();
        record(&history, 1);
        history.stats().bytes
    };
    let options = Options { budget_bytes: one, ..Options::of_vocab(VOCAB) };
    let history = History::over(options, Some(Cold::over(nvme)));
    record(&history, 3);
    for prompt in [0, 1, 2, 0] {
        assert!(is_drafted(&history, prompt));
        let (reads, _) = faults.counts();
        assert!(is_drafted(&history, prompt));
        assert_eq!(faults.counts().0, reads, "prompt {prompt} is read again");
    }
    let stats = history.stats();
    assert_eq!((stats.prompts, stats.cold_prompts, stats.forgotten_prompts), (1, 2, 0));
    assert_eq!(stats.bytes, one);
}

/// A disk that fails just then takes nothing away either: memory is beyond its budget until the next record.
#[test]
fn a_prompt_that_cannot_take_the_place_of_another_is_kept() {
    const EIO: i32 = 5;
    const FILE_BYTES: u64 = 2 << 12;
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let nvme = Nvme::with_storage(Arc::<Faults>::clone(&faults), FILE_BYTES, true);
    let options = Options { budget_bytes: 2000, ..Options::of_vocab(VOCAB) };
    let history = History::over(options, Some(Cold::over(nvme)));
    let long: Vec<u32> = (0..180).map(|it| it % VOCAB).collect();
    for prompt in 0..3 {
        history.record(&[prompt], &long, 0.0, 0).unwrap();
    }
    let drafted =
        |prompt| history.draft(Digest::of(&[prompt]), &[5, 6, 7], 1).unwrap().tokens == [8];
    faults.fail_writes_after(0, EIO);
    for prompt in [0, 1, 2, 1, 0] {
        assert!(drafted(prompt), "{prompt}");
    }
    let stats = history.stats();
    assert_eq!((stats.prompts + stats.cold_prompts, stats.forgotten_prompts), (3, 0));
    assert_eq!(stats.prompts, 2, "one more than memory has room for");
    faults.heal();
    history.record(&[2], &[1, 2, 3], 0.0, 0).unwrap();
    assert!(history.stats().bytes <= 2000 && history.stats().forgotten_prompts == 0);
    assert!([0, 1, 2].into_iter().all(drafted));
}

#[test]
fn a_draft_forgets_nothing_when_the_disk_is_full() {
    const ENOSPC: i32 = 28;
    let faults = Arc::new(Faults::in_memory(FILE_BYTES));
    let one = {
        let history = super::history();
        record(&history, 1);
        history.stats().bytes
    };
    // Memory for none, and for two of five.
    for budget_bytes in [0, 2 * one + one / 2] {
        let history = with_faults(&faults, budget_bytes);
        record(&history, 5);
        faults.fail_writes_after(0, ENOSPC);
        for prompt in [0, 1, 2, 3, 4, 0] {
            assert!(is_drafted(&history, prompt), "{prompt}");
        }
        let stats = history.stats();
        assert_eq!((stats.prompts + stats.cold_prompts, stats.forgotten_prompts), (5, 0));
        assert!(stats.bytes <= budget_bytes);
        faults.heal();
    }
}

#[test]
fn a_prompt_larger_than_memory_leaves_the_others_there() {
    let history = with_faults(&Arc::new(Faults::in_memory(FILE_BYTES)), 8 << 10);
    record(&history, 4);
    assert_eq!(history.stats().cold_prompts, 0);
    let long: Vec<u32> = (0..4000).map(|it| it % VOCAB).collect();
    history.record(&[77], &long, 0.0, 0).unwrap();
    assert_eq!((history.stats().prompts, history.stats().cold_prompts), (4, 1));
    assert_eq!(history.draft(Digest::of(&[77]), &[5, 6, 7], 2).unwrap().tokens, [8, 9]);
    assert_eq!((history.stats().prompts, history.stats().cold_prompts), (4, 1));
}

/// Prompts come and go while others are read from the file, saved and recorded.
#[test]
fn cold_prompts_of_several_threads_are_whole() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let history = with_faults(&Arc::new(Faults::in_memory(FILE_BYTES)), 4 << 10);
    record(&history, 30);
    thread::scope(|scope| {
        for thread in 0..3 {
            let history = &history;
            scope.spawn(move || {
                for turn in 0..300 {
                    assert!(is_drafted(history, (7 * turn + thread) % 30));
                }
            });
        }
        scope.spawn(|| (0..20).for_each(|_| history.save(&path).unwrap()));
        for turn in 0..200 {
            // Tokens that no prompt of `record` has.
            history.record(&[turn % 30], &[900, 901, turn], 0.0, 0).unwrap();
        }
    });
    let stats = history.stats();
    assert_eq!((stats.prompts + stats.cold_prompts, stats.forgotten_prompts), (30, 0));
    assert!(stats.bytes <= 4 << 10);
    history.save(&path).unwrap();
    let loaded = super::history();
    loaded.load(&path).unwrap();
    assert!((0..30).all(|prompt| is_drafted(&loaded, prompt)));
    assert_eq!(loaded.stats().tokens, 30 * 50 + 200 * 3);
}
