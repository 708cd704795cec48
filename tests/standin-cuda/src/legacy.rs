//! How the legacy stream and the blocking streams are ordered: work of either waits for what was
//! given to the other before.

use std::sync::atomic::Ordering;

use dormouse_device::Device;

use crate::code::Code;
use crate::state::Driver;
use crate::streams::{Stream, refused};

/// Before work is given to `stream`: lets it wait for what it is ordered with. Whether it has to
/// wait for anything new.
pub(crate) fn order(driver: &Driver, stream: &Stream) -> Result<bool, Code> {
    if stream.is_legacy() {
        let mut waits = false;
        for blocking in driver.streams.blocking() {
            waits |= follow(driver, &blocking)?;
        }
        return Ok(waits);
    }
    if !stream.is_blocking() {
        return Ok(false);
    }
    let legacy = &driver.streams.legacy;
    let given = legacy.given();
    if given <= stream.legacy_seen.load(Ordering::Acquire) {
        return Ok(false);
    }
    join(driver, stream, legacy)?;
    // Release: a reader of the count finds the wait in the queue.
    stream.legacy_seen.fetch_max(given, Ordering::Release);
    Ok(true)
}

/// Lets the legacy stream wait for what a blocking stream was given. Whether there was anything.
pub(crate) fn follow(driver: &Driver, blocking: &Stream) -> Result<bool, Code> {
    let given = blocking.given();
    if !blocking.is_blocking() || given <= blocking.seen_by_legacy.load(Ordering::Acquire) {
        return Ok(false);
    }
    join(driver, &driver.streams.legacy, blocking)?;
    // Release: as above.
    blocking.seen_by_legacy.fetch_max(given, Ordering::Release);
    Ok(true)
}

fn join(driver: &Driver, waiting: &Stream, ahead: &Stream) -> Result<(), Code> {
    let reached = driver.host.record(&ahead.host).map_err(refused)?;
    driver.host.wait(&waiting.host, &reached).map_err(refused)
}
