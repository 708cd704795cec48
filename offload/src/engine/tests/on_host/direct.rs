//! What comes of file I/O on frozen pages, which the guard watches: no device that works in the
//! order of streams has either.

use dormouse_device::host::guard;

use super::both::Plan;
use crate::engine::tests::{MIB, peek, poke};
use crate::ids::Tier;
use crate::residency::State;

#[test]
fn a_write_cancels_the_sleep_and_is_not_lost() {
    guard::install().unwrap();
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 3);
    house.faults.hold(true, false);
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.faults.wait_held(1);
    poke(address + 8192, 77);
    house.faults.hold(false, false);
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!((house.state(id), peek(address + 8192)), (State::Awake, 77));
    let stats = house.engine.stats();
    assert_eq!((stats.written_meanwhile, stats.sleeps_backed_out, stats.sleeps), (1, 1, 0));
    assert_eq!(house.nvme_used(), 0);
    // Later it may sleep all the same.
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!(house.state(id), State::Nvme);
    house.engine.wait_awake(&[id]).unwrap();
    assert_eq!(peek(address + 8192), 77);
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}
