//! What is kept, and what is refused.

use super::{VOCAB, history};
use crate::{Digest, History, HistoryError, Options};

fn refused(options: Options) -> String {
    History::new(options).unwrap_err().to_string()
}

#[test]
fn settings_out_of_range_are_refused() {
    let options = Options::of_vocab;
    assert_eq!(refused(options(0)), "vocab is 0; accepted: 1 to 2147483648");
    let none = Options { epochs_kept: 0, ..options(9) };
    assert_eq!(refused(none), "epochs_kept is 0; accepted: 1 to 64");
}

#[test]
fn what_is_refused_leaves_no_trace() {
    let history = history();
    history.record(&[1], &[2, 3, 4, 5], 0.5, 3).unwrap();
    let before = history.stats();
    let said = |prompt: &[u32], response: &[u32], reward, epoch| {
        history.record(prompt, response, reward, epoch).unwrap_err().to_string()
    };
    assert_eq!(said(&[VOCAB], &[], 0.0, 3), "id 0 of prompt is 1000; accepted: 0 to 999");
    assert_eq!(said(&[1], &[0, VOCAB + 7], 0.0, 3), "id 1 of response is 1007; accepted: 0 to 999");
    assert_eq!(said(&[1], &[2], f32::NAN, 3), "reward is NaN; accepted: a finite number");
    assert_eq!(
        said(&[1], &[2], 0.0, 1),
        "epoch is 1 of a prompt with responses of epoch 3; accepted: 2 to 4294967295"
    );
    assert_eq!(history.stats(), before);
    assert_eq!(history.draft(Digest::of(&[1]), &[2, 3, 4], 4).unwrap().tokens, [5]);
}

#[test]
fn an_empty_prompt_and_an_empty_response_are_recorded() {
    let history = history();
    history.record(&[], &[], 0.0, 0).unwrap();
    history.record(&[], &[7, 8, 9, 10], 0.0, 0).unwrap();
    assert_eq!(history.draft(Digest::of(&[]), &[7, 8, 9], 4).unwrap().tokens, [10]);
    assert_eq!((history.stats().prompts, history.stats().tokens), (1, 4));
}

#[test]
fn earlier_epochs_are_forgotten_when_a_later_one_begins() {
    let history = history();
    for epoch in 0..4 {
        for _ in 0..3 {
            history.record(&[1, 2, 3], &[epoch + 10, epoch + 20, 5], 0.0, epoch).unwrap();
        }
    }
    // Two epochs of three responses.
    assert_eq!(history.stats().tokens, 2 * 3 * 3);
    let after = |token| history.draft(Digest::of(&[1, 2, 3]), &[2, 3, token], 1).unwrap().tokens;
    assert_eq!((after(13), after(12)), (vec![23], vec![22]));
    assert_eq!(after(11), [0; 0]);
    // An earlier epoch that is still kept.
    history.record(&[1, 2, 3], &[17], 0.0, 2).unwrap();
    assert_eq!(history.stats().tokens, 2 * 3 * 3 + 1);
}

#[test]
fn memory_is_as_the_figures_say() {
    let history = history();
    let response: Vec<u32> = (0..VOCAB).collect();
    for _ in 0..100 {
        history.record(&[1, 2, 3], &response, 0.0, 0).unwrap();
    }
    let stats = history.stats();
    let per_token = stats.bytes as f64 / stats.tokens as f64;
    assert!((8.0..=12.0).contains(&per_token), "{per_token} bytes a token");
    assert!(history.forget(Digest::of(&[1, 2, 3])));
    assert!(!history.forget(Digest::of(&[1, 2, 3])));
    assert_eq!((history.stats().bytes, history.stats().prompts), (0, 0));
}

#[test]
fn feedback_is_counted() {
    let history = history();
    history.count_feedback(4, 4);
    history.count_feedback(6, 1);
    history.count_feedback(2, 9);
    let stats = history.stats();
    assert_eq!((stats.drafted_tokens, stats.accepted_tokens), (12, 7));
}

#[test]
fn threads_record_and_draft_together() {
    let history = history();
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let history = &history;
            scope.spawn(move || {
                for number in 0..200_u32 {
                    let prompt = [number % 5];
                    let base = 10 * (number % 7);
                    let response = [base, base + 1, base + 2, base + 3];
                    history.record(&prompt, &response, thread as f32, 0).unwrap();
                    let found = history.draft(Digest::of(&prompt), &response[..3], 1).unwrap();
                    assert_eq!(found.tokens, [base + 3]);
                }
            });
        }
    });
    assert_eq!(history.stats().tokens, 4 * 200 * 4);
    let refused = history.record(&[0], &[VOCAB], 0.0, 0);
    assert!(matches!(refused, Err(HistoryError::Id { .. })));
}
