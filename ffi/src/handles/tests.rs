use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// An incomplete type of C, for the tests.
struct Opaque;

fn status_of<V: std::fmt::Debug>(result: Result<V, Fault>) -> i32 {
    result.unwrap_err().status
}

#[test]
fn null_foreign_and_stale_handles_have_distinct_errors() {
    let table = Table::new(Kind::Prefix);
    let handle: *mut Opaque = table.insert(Arc::new(1)).unwrap();
    assert_eq!(*table.get(handle).unwrap(), 1);
    assert_eq!(status_of(table.get(std::ptr::null_mut::<Opaque>())), status::DORMOUSE_ERR_NULL);
    let mut local = 0_u64;
    assert_eq!(status_of(table.get(&raw mut local)), status::DORMOUSE_ERR_HANDLE);
    table.remove(handle).unwrap();
    assert_eq!(status_of(table.get(handle)), status::DORMOUSE_ERR_STALE);
    assert_eq!(status_of(table.remove(handle)), status::DORMOUSE_ERR_STALE);
}

#[test]
fn a_handle_of_another_kind_is_foreign() {
    let nodes = Table::new(Kind::Prefix);
    let plans = Table::<i32>::new(Kind::Plan);
    let node: *mut Opaque = nodes.insert(Arc::new(1)).unwrap();
    let _plan: *mut Opaque = plans.insert(Arc::new(2)).unwrap();
    assert_eq!(status_of(plans.get(node)), status::DORMOUSE_ERR_HANDLE);
}

#[test]
fn a_destroy_during_a_call_is_refused_and_changes_nothing() {
    let table = Table::new(Kind::Plan);
    let handle: *mut Opaque = table.insert_exclusive(5).unwrap();
    let busy = table.with(handle, |_| Ok(status_of(table.destroy(handle))));
    assert_eq!(busy.unwrap(), status::DORMOUSE_ERR_BUSY);
    assert_eq!(table.with(handle, |value| Ok(*value)).unwrap(), 5);
    table.destroy(handle).unwrap();
    assert_eq!(status_of(table.destroy(handle)), status::DORMOUSE_ERR_STALE);
    table.destroy(std::ptr::null_mut::<Opaque>()).unwrap();
}

#[test]
fn a_slot_whose_generations_are_used_up_is_retired() {
    let table = Table::new(Kind::Tag);
    let first: *mut Opaque = table.insert(Arc::new(1)).unwrap();
    table.remove(first).unwrap();
    table.slots.lock().slots[0].generation = u32::MAX - 1;
    let last: *mut Opaque = table.insert(Arc::new(2)).unwrap();
    table.remove(last).unwrap();
    let next: *mut Opaque = table.insert(Arc::new(3)).unwrap();
    assert_ne!(next.addr() as u32, last.addr() as u32, "the slot is not used again");
    assert_eq!(status_of(table.get(last)), status::DORMOUSE_ERR_STALE);
}

#[test]
fn a_second_thread_inside_is_refused() {
    let cell = Exclusive::new(Kind::Plan, 5);
    let outcome = cell.with(|_| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(status_of(cell.with(|_| Ok(()))), status::DORMOUSE_ERR_BUSY);
                assert_eq!(status_of(cell.take()), status::DORMOUSE_ERR_BUSY);
            });
        });
        Ok(())
    });
    outcome.unwrap();
    assert_eq!(cell.take().unwrap(), 5);
    assert_eq!(status_of(cell.with(|_| Ok(()))), status::DORMOUSE_ERR_STALE);
    assert_eq!(status_of(cell.take()), status::DORMOUSE_ERR_STALE);
}

#[test]
fn after_a_panic_inside_only_destroy_is_accepted() {
    let cell = Arc::new(Exclusive::new(Kind::Prefix, 5));
    let theirs = Arc::clone(&cell);
    let _panicked = std::thread::spawn(move || {
        theirs.with(|_| -> Result<(), Fault> { std::panic::resume_unwind(Box::new("half way")) })
    })
    .join();
    assert_eq!(status_of(cell.with(|_| Ok(()))), status::DORMOUSE_ERR_STATE);
    assert_eq!(cell.take().unwrap(), 5);
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u32),
    Get(usize),
    Remove(usize),
    Forge(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<u32>().prop_map(Step::Insert),
        3 => any::<usize>().prop_map(Step::Get),
        2 => any::<usize>().prop_map(Step::Remove),
        1 => any::<u64>().prop_map(Step::Forge),
    ]
}

proptest! {
    /// Compares with the naive model: a map from every handle to its value while it lives.
    #[test]
    fn agrees_with_a_map_that_never_reuses(steps in prop::collection::vec(step(), 0..120)) {
        let table = Table::new(Kind::Plan);
        let mut model: HashMap<usize, Option<u32>> = HashMap::new();
        let mut given: Vec<*mut Opaque> = Vec::new();
        for step in steps {
            match step {
                Step::Insert(value) => {
                    let handle: *mut Opaque = table.insert(Arc::new(value)).unwrap();
                    prop_assert!(model.insert(handle.addr(), Some(value)).is_none(), "given twice");
                    given.push(handle);
                }
                Step::Get(at) if !given.is_empty() => {
                    let handle = given[at % given.len()];
                    let seen = table.get(handle).map(|v| *v).map_err(|f| f.status);
                    prop_assert_eq!(seen, model[&handle.addr()].ok_or(status::DORMOUSE_ERR_STALE));
                }
                Step::Remove(at) if !given.is_empty() => {
                    let handle = given[at % given.len()];
                    let seen = table.remove(handle).map(|v| *v).map_err(|f| f.status);
                    let known = model.insert(handle.addr(), None).flatten();
                    prop_assert_eq!(seen, known.ok_or(status::DORMOUSE_ERR_STALE));
                }
                Step::Forge(bits) => {
                    let forged = std::ptr::without_provenance_mut::<Opaque>(bits as usize);
                    if !model.contains_key(&forged.addr()) {
                        prop_assert!(table.get(forged).is_err());
                    }
                }
                _ => {}
            }
            prop_assert_eq!(table.live().len(), model.values().flatten().count());
        }
    }
}
