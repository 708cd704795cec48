//! Saved histories, whole and damaged.

use std::{fs, thread};

use proptest::prelude::*;

use super::{Dir, VOCAB, history};
use crate::limits::CONTEXT_TOKENS;
use crate::prompt::{NO_TOKEN, Prompt};
use crate::{Digest, History, HistoryDir, HistoryError, Options};

fn filled() -> History {
    let history = history();
    for number in 0..30_u32 {
        let response: Vec<u32> = (0..number).map(|it| (it * it + number) % VOCAB).collect();
        history.record(&[number % 4, 8], &response, number as f32, number / 20).unwrap();
    }
    history
}

fn drafts(history: &History) -> Vec<Vec<u32>> {
    let ends = (0..30_u32).map(|number| [0, 1, 4].map(|square| (square + number) % VOCAB));
    let prompts = [0, 1, 2, 3].map(|it| Digest::of(&[it, 8]));
    let each = |end: [u32; 3]| prompts.map(|it| history.draft(it, &end, 8).unwrap().tokens);
    ends.flat_map(each).collect()
}

#[test]
fn a_saved_history_loads_to_the_same() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let old = filled();
    old.save(&path).unwrap();
    let new = history();
    new.record(&[77], &[1, 2, 3], 0.0, 0).unwrap();
    new.load(&path).unwrap();
    assert_eq!(drafts(&new), drafts(&old));
    assert!(drafts(&old).iter().filter(|it| !it.is_empty()).count() > 20);
    assert_eq!((new.stats().prompts, new.stats().tokens), (4, old.stats().tokens));
    new.record(&[1, 8], &[5], 0.0, 2).unwrap();
    new.save(&path).unwrap();
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1, "nothing is left aside");
}

#[test]
fn cold_prompts_are_saved_too_and_a_small_budget_loads_all() {
    let dir = Dir::new();
    let options = |name: &str| {
        let cold = dir.0.join(name);
        fs::create_dir(&cold).unwrap();
        let cold = Some((cold, 1 << 20));
        Options { budget_bytes: 0, cold, ..Options::of_vocab(VOCAB) }
    };
    let old = History::new(options("old")).unwrap();
    for prompt in 0..9 {
        old.record(&[prompt], &[1, 2, 3, 4], 0.0, 0).unwrap();
    }
    let path = dir.0.join("saved");
    old.save(&path).unwrap();
    let new = History::new(options("new")).unwrap();
    new.load(&path).unwrap();
    assert_eq!(new.stats().cold_prompts, 9);
    assert_eq!(new.draft(Digest::of(&[8]), &[1, 2, 3], 4).unwrap().tokens, [4]);
}

#[test]
fn every_flipped_bit_and_every_cut_is_refused_and_changes_nothing() {
    let dir = Dir::new();
    let (good, bad) = (dir.0.join("good"), dir.0.join("bad"));
    let old = filled();
    old.save(&good).unwrap();
    let bytes = fs::read(&good).unwrap();
    let new = filled();
    let before = (drafts(&new), new.stats());
    let refuse = |bytes: &[u8]| {
        fs::write(&bad, bytes).unwrap();
        let refused = new.load(&bad).unwrap_err();
        assert!(matches!(refused, HistoryError::Damaged { .. }), "{refused}");
        assert_eq!(fs::read(&bad).unwrap(), bytes);
    };
    for at in (0..bytes.len()).step_by(5) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        refuse(&damaged);
        refuse(&bytes[..at]);
    }
    refuse(&[bytes.as_slice(), &[0]].concat());
    assert_eq!((drafts(&new), new.stats()), before);
}

#[test]
fn another_version_and_a_larger_vocabulary_are_named() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    filled().save(&path).unwrap();
    let small = History::new(Options::of_vocab(10)).unwrap();
    let said = small.load(&path).unwrap_err().to_string();
    assert!(said.contains("its vocabulary has 1000 tokens, and this one 10"), "{said}");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 9;
    fs::write(&path, bytes).unwrap();
    let said = small.load(&path).unwrap_err().to_string();
    assert!(said.contains("its version is 9"), "{said}");
    let said = small.load(&dir.0.join("absent")).unwrap_err().to_string();
    assert!(said.contains("absent: reading: No such file"), "{said}");
}

#[test]
fn a_save_that_fails_keeps_the_old_file() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let history = filled();
    history.save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    // A directory in the place of the file that is written aside.
    let aside = dir.0.join(".saved.new");
    fs::create_dir(&aside).unwrap();
    history.record(&[1], &[1], 0.0, 9).unwrap();
    let said = history.save(&path).unwrap_err().to_string();
    assert!(said.contains("saving: File exists"), "{said}");
    assert_eq!(fs::read(&path).unwrap(), before);
    // What a crash left there is replaced.
    fs::remove_dir(&aside).unwrap();
    fs::write(&aside, b"half of a history").unwrap();
    history.save(&path).unwrap();
    assert_ne!(fs::read(&path).unwrap(), before);
    assert!(!aside.exists());
}

#[test]
fn saves_of_several_threads_leave_a_whole_file() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let history = filled();
    history.save(&path).unwrap();
    thread::scope(|scope| {
        for thread in 0..3_u32 {
            let (history, path) = (&history, &path);
            scope.spawn(move || {
                for number in 0..40 {
                    // Files of different lengths.
                    history.record(&[thread, number, 9], &[thread; 30], 0.0, 0).unwrap();
                    history.save(path).unwrap();
                }
            });
        }
        scope.spawn(|| (0..40).for_each(|_| super::history().load(&path).unwrap()));
    });
    let new = super::history();
    new.load(&path).unwrap();
    assert_eq!((new.stats().prompts, new.stats().tokens), (124, history.stats().tokens));
}

#[test]
fn a_small_memory_loads_what_was_used_last() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let old = history();
    for prompt in 0..8 {
        old.record(&[prompt], &[1, 2, 3, 4], 0.0, 0).unwrap();
    }
    let draft = |of: &History, prompt| of.draft(Digest::of(&[prompt]), &[1, 2, 3], 1).unwrap();
    for prompt in [5, 2] {
        assert_eq!(draft(&old, prompt).tokens, [4]);
    }
    old.save(&path).unwrap();
    let two = Options { budget_bytes: old.stats().bytes * 5 / 16, ..Options::of_vocab(VOCAB) };
    let new = History::new(two).unwrap();
    new.load(&path).unwrap();
    assert_eq!((new.stats().prompts, new.stats().forgotten_prompts), (2, 6));
    assert_eq!((draft(&new, 5).tokens, draft(&new, 2).tokens), (vec![4], vec![4]));
}

#[test]
fn a_prompt_twice_and_an_id_beyond_the_vocabulary_are_refused() {
    let dir = Dir::new();
    let path = dir.0.join("saved");
    let history = history();
    history.record(&[1], &[2, 900], 0.0, 0).unwrap();
    history.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes[..bytes.len() - 4].to_vec();
        change(&mut bytes);
        let sum = crc32c::crc32c(&bytes);
        bytes.extend(sum.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        super::history().load(&path).unwrap_err().to_string()
    };
    let said = refused(&|bytes| {
        let prompt = bytes[24..].to_vec();
        bytes.extend(prompt);
        bytes[16] = 2;
    });
    assert!(said.contains(" twice"), "{said}");
    let said = refused(&|bytes| bytes[12..16].copy_from_slice(&800_u32.to_le_bytes()));
    assert!(said.contains("a token id beyond the vocabulary of 800"), "{said}");
    let said = refused(&|bytes| bytes[16] = 2);
    assert!(said.contains("24 bytes of a prompt of 0"), "{said}");
    let said = refused(&|bytes| bytes[16] = 0);
    assert!(said.contains("bytes after its prompts"), "{said}");
    fs::write(&path, &bytes).unwrap();
    super::history().load(&path).unwrap();
}

#[test]
fn tokens_that_no_record_makes_are_refused() {
    let (tail_at, tokens_at) = (0, CONTEXT_TOKENS + 3);
    let mut prompt = Prompt::new(&[1, 2]);
    prompt.record(&[3, 4], 0.0, 0, 0).unwrap();
    let mut bytes = Vec::new();
    prompt.encode(&mut bytes);
    let changed = |words: &[(usize, u32)]| {
        let mut bytes = bytes.clone();
        for &(word, value) in words {
            bytes[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
        }
        Prompt::decode(&bytes, VOCAB)
    };
    assert!(changed(&[]).is_ok());
    let both = |place, value| [(tail_at + place, value), (tokens_at + place, value)];
    assert!(changed(&both(6, 3)).is_ok(), "another prompt");
    // A response with no token, tails beyond the vocabulary, with a gap, and unlike the prompt's.
    assert!(changed(&[(tokens_at + CONTEXT_TOKENS + 1, NO_TOKEN)]).is_err());
    assert!(changed(&both(6, VOCAB)).is_err());
    assert!(changed(&both(6, NO_TOKEN)).is_err());
    assert!(changed(&[(tail_at + 6, 3)]).is_err());
    assert!(changed(&[(tokens_at + 6, 3)]).is_err());
}

#[test]
fn a_directory_has_one_owner() {
    let dir = Dir::new();
    let first = HistoryDir::lock(&dir.0).unwrap();
    let said = HistoryDir::lock(&dir.0).unwrap_err().to_string();
    let owner = format!("is in use by process {} on ", std::process::id());
    assert!(said.contains(&owner) && said.contains("accepted: a directory for each"), "{said}");
    filled().save(&first.path()).unwrap();
    drop(first);
    history().load(&HistoryDir::lock(&dir.0).unwrap().path()).unwrap();
}

proptest! {
    /// With a right checksum too: whoever writes such bytes meets checks, not a panic.
    #[test]
    fn prompts_of_any_bytes_are_refused_or_sound(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        end in prop::collection::vec(0_u32..8, 3..8),
    ) {
        let mut prompt = Prompt::new(&[1, 2]);
        for response in [[3_u32, 4, 5, 6], [3, 4, 6, 5]] {
            prompt.record(&response, 1.0, 0, 0).unwrap();
        }
        let mut bytes = Vec::new();
        prompt.encode(&mut bytes);
        prop_assert_eq!(bytes.len() as u64, prompt.encoded_bytes());
        prop_assert_eq!(Prompt::decode(&bytes, VOCAB), Ok(prompt));
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(read) = Prompt::decode(&bytes, VOCAB) {
            read.draft(&end, 8, crate::Weighing::Reward);
        }
    }
}
