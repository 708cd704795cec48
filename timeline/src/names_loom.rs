//! Every interleaving of two threads that want names at the same time.

use super::*;
use loom::sync::Arc;
use loom::thread;

/// Interns `left` and `right` at once and hands the ids and the table back.
#[expect(clippy::unwrap_used, reason = "test helper")]
fn both(left: &'static str, right: &'static str) -> (NameId, NameId, Arc<NameTable>) {
    let table = Arc::new(NameTable::new());
    let other = Arc::clone(&table);
    let thread = thread::spawn(move || {
        let id = other.intern(left);
        assert_eq!(other.read().get(id), left, "who holds an id can read its name");
        id
    });
    let right = table.intern(right);
    (thread.join().unwrap(), right, table)
}

#[test]
fn loom_concurrent_interning_of_a_name_gives_one_id() {
    loom::model(|| {
        let (left, right, table) = both("forward 12", "forward 12");
        assert_eq!(left, right);
        assert_eq!(table.read().get(left), "forward 12");
    });
}

#[test]
fn loom_names_with_a_common_prefix_get_distinct_slots() {
    // Names whose search starts at the same slot, or they would never meet.
    let start = |name: &str| home(&encode(name));
    let others = ["forward 2", "forward 4", "forward 5", "forward 6", "forward 7"];
    let other = others.into_iter().find(|other| start(other) == start("forward 1")).unwrap();
    loom::model(move || {
        let (left, right, table) = both("forward 1", other);
        assert_ne!(left, right);
        let names = table.read();
        assert_eq!((names.get(left), names.get(right)), ("forward 1", other));
        assert_eq!(table.intern("forward 3"), NameId::OTHER, "the table is full");
    });
}
