//! What the timeline is told of a file whose I/O is less than was hoped for.

use dormouse_timeline::{Event, Lane};

use super::*;
use crate::ids::Tier;
use dormouse_storage::testing::seccomp::refuse;
use dormouse_storage::testing::skip_without_io_uring;

/// Not measured: the first request is that of the first sleep.
const FILE_BYTES: usize = 8 * MIB;
/// `IORING_REGISTER_BUFFERS2`: a table of memory.
const REGISTER_TABLE: u32 = 15;

/// The notices so far.
fn notices(engine: &Engine<TestDevice>) -> Vec<String> {
    let snapshot = engine.timeline().snapshot();
    let name = |event: &Event| match *event {
        Event::Instant { lane: Lane::Notice, name, .. } => {
            Some(snapshot.names.get(name).to_owned())
        }
        _ => None,
    };
    snapshot.events.iter().filter_map(name).collect()
}

/// Three regions go to the file and back, with `call` refused from the start; then the notices.
fn notices_where(call: libc::c_long, second: Option<u32>) -> Option<Vec<String>> {
    let run = move || {
        // For this thread, and for those of the engine that it starts.
        refuse(call, second, libc::EPERM);
        let _turn = Turn::take();
        let allocator = new_allocator(64 * MIB);
        let config = EngineConfig { nvme: Some(real_file(FILE_BYTES)), ..Plan::default().config };
        let timeline = Arc::new(Timeline::new(1024));
        let engine = Engine::new(Arc::clone(&allocator), config, timeline).unwrap();
        if engine.stats().nvme_io_engine != Some(IoEngine::Uring) {
            skip_without_io_uring(format!("{:?}", notices(&engine)));
            return None;
        }
        for seed in 0..3 {
            let address = allocator.allocate(&Request::new(MIB)).unwrap().range.start;
            fill(address, MIB, seed);
            let id = engine.adopt(address, Role::Dormant, label("t", None)).unwrap();
            engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            engine.wait_settled(&[id]).unwrap();
            assert_eq!(engine.region_info(id).unwrap().state, RegionState::Nvme);
            engine.wait_awake(&[id]).unwrap();
            assert!(holds(address, MIB, seed));
            engine.free(address, 0).unwrap();
        }
        Some(notices(&engine))
    };
    std::thread::spawn(run).join().unwrap()
}

#[test]
fn a_ring_given_up_while_running_is_one_notice() {
    let Some(notices) = notices_where(libc::SYS_io_uring_enter, None) else { return };
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].starts_with("io_uring_enter: "), "{notices:?}");
}

#[test]
fn memory_that_is_not_registered_is_one_notice() {
    let table = Some(REGISTER_TABLE);
    let Some(notices) = notices_where(libc::SYS_io_uring_register, table) else { return };
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].starts_with("memory is not registered with io_uring"), "{notices:?}");
}
