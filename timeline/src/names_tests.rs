use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;

fn shown(table: &NameTable, id: NameId) -> String {
    table.read().get(id).to_owned()
}

#[test]
fn a_name_keeps_its_id_and_is_read_back() {
    let table = NameTable::new();
    for name in ["", "a", "7 bytes", "8 bytes!", "forward 12", "größer", "\0", "\u{10ffff}"] {
        let id = table.intern(name);
        assert_eq!(table.intern(name), id);
        assert_eq!(shown(&table, id), name);
        assert_ne!(id, NameId::OTHER);
    }
    assert_eq!(table.intern("other"), NameId::OTHER);
    assert_eq!(shown(&table, NameId::from_index(u16::MAX)), "other");
}

#[test]
fn a_name_is_cut_between_characters() {
    let table = NameTable::new();
    let longest = "x".repeat(NAME_BYTES_MAX);
    assert_eq!(shown(&table, table.intern(&longest)), longest);
    assert_eq!(table.intern(&(longest.clone() + "y")), table.intern(&longest));
    // Two bytes a character: the last would straddle the limit.
    let wide = "x".to_owned() + &"ä".repeat(NAME_BYTES_MAX);
    let expected = "x".to_owned() + &"ä".repeat((NAME_BYTES_MAX - 1) / 2);
    assert_eq!(shown(&table, table.intern(&wide)), expected);
}

#[test]
fn names_beyond_a_full_table_are_other() {
    let table = NameTable::new();
    let ids: Vec<NameId> = (0..NAMES_MAX).map(|i| table.intern(&format!("name {i}"))).collect();
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), NAMES_MAX);
    assert!(!ids.contains(&NameId::OTHER));
    assert_eq!(table.intern("one too many"), NameId::OTHER);
    assert_eq!(table.intern("name 7"), ids[7], "old names are still found");
}

#[test]
fn threads_agree_on_names_that_share_their_beginnings() {
    const THREADS: usize = 4;
    let names: Vec<String> = (0..40).map(|i| format!("a long common beginning {i}")).collect();
    let table = NameTable::new();
    let start = Barrier::new(THREADS);
    let answers: Vec<Vec<NameId>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|turn| {
                let (names, table, start) = (&names, &table, &start);
                scope.spawn(move || {
                    start.wait();
                    let mut ids = vec![NameId::OTHER; names.len()];
                    for step in 0..names.len() {
                        // Each thread in an order of its own.
                        let at = (step * (2 * turn + 1) * 3 + turn * 7) % names.len();
                        ids[at] = table.intern(&names[at]);
                    }
                    names.iter().map(|name| table.intern(name)).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|ids| *ids == answers[0]));
    let read = table.read();
    for (name, id) in names.iter().zip(&answers[0]) {
        assert_eq!(read.get(*id), name);
    }
}

proptest! {
    #[test]
    fn agrees_with_a_hash_map(names in proptest::collection::vec("[ab]{0,20}|.{0,9}", 0..60)) {
        let table = NameTable::new();
        let mut model: HashMap<String, NameId> = HashMap::new();
        for name in &names {
            let id = table.intern(name);
            let known = model.len();
            let expected = *model.entry(name.clone()).or_insert(id);
            prop_assert_eq!(id, expected);
            if model.len() > known {
                prop_assert_eq!(model.values().filter(|other| **other == id).count(), 1);
            }
        }
        let read = table.read();
        for (name, id) in &model {
            prop_assert_eq!(read.get(*id), name);
        }
    }
}
