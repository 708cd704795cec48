//! A dialogue that threads share.

use std::thread;

use super::{embedding, options, record_one};
use crate::dialogue::{Dialogue, DialogueOptions};

#[test]
fn records_and_retrievals_of_several_threads_see_whole_entries() {
    let dialogue = Dialogue::new(DialogueOptions { entries_max: 1200, ..options() }).unwrap();
    thread::scope(|scope| {
        for thread in 0..3_u64 {
            let dialogue = &dialogue;
            scope.spawn(move || {
                for number in 0..600 {
                    let number = thread * 1000 + number;
                    record_one(dialogue, &embedding(number), number as f64);
                }
            });
        }
        scope.spawn(|| {
            for number in 0..600 {
                let found = dialogue.retrieve(&embedding(number), 0.0, 5).unwrap();
                for it in found {
                    assert_eq!(*it.entry.query, *it.entry.time_s.to_string().as_bytes());
                    assert_eq!(*it.entry.passage, *b"passage");
                }
            }
        });
    });
    let stats = dialogue.stats();
    assert_eq!((stats.entries, stats.forgotten_entries), (1200, 600));
}
