//! The disk of the NVMe tier, used as a runtime uses it.

use std::path::PathBuf;

use dormouse_parallel::draw::bytes;
use dormouse_storage::{IoEngine, Nvme, NvmeConfig};

use super::Check;
use super::library::Settings;

const DIR: &str = "DORMOUSE_NVME_DIR";
const FILE: &str = "DORMOUSE_NVME_FILE_BYTES";
const ENGINE: &str = "DORMOUSE_NVME_ENGINE";
const DEPTH: &str = "DORMOUSE_NVME_QUEUE_DEPTH";
/// If no size is set: what is written and read to measure.
const FILE_BYTES: u64 = 64 << 20;
/// If no depth is set: requests in flight.
const QUEUE_DEPTH: u64 = 4;

/// Creates the tier for a moment: its file, its I/O engine, and its measured rates.
pub(super) fn check(settings: &Settings) -> Check {
    const WHAT: &str = "disk";
    let dir = settings.text(DIR);
    if dir.is_empty() {
        let advice = format!(
            "set {DIR} to a directory on an NVMe disk, and more can sleep than host memory holds"
        );
        return Check::advice(WHAT, format!("{DIR} is not set: nothing sleeps on a disk"), advice);
    }
    let config = NvmeConfig {
        dir: PathBuf::from(&dir),
        file_bytes: settings.set_number(FILE).unwrap_or(FILE_BYTES),
        file_bytes_max: 0,
        io_threads: 1,
        io_engine: IoEngine::named(&settings.text(ENGINE)).unwrap_or_default(),
        queue_depth: settings.set_number(DEPTH).unwrap_or(QUEUE_DEPTH) as usize,
        write_budget_bytes: 0,
    };
    let tier = match Nvme::create(&config, false) {
        Ok(tier) => tier,
        Err(error) => {
            let advice = format!(
                "set {DIR} to an existing, writable directory on a disk with room for {FILE}"
            );
            return Check::broken(WHAT, error.to_string(), advice);
        }
    };
    let (usage, rates) = (tier.usage(), tier.rates());
    let through = if usage.buffered { "through the page cache" } else { "O_DIRECT" };
    let seen = format!(
        "{dir}: writes {}/s, reads {}/s, {through}, I/O by {}, room for {}",
        bytes(rates.write_bytes_per_s),
        bytes(rates.read_bytes_per_s),
        usage.io_engine.name(),
        bytes(settings.number(FILE).unwrap_or(FILE_BYTES))
    );
    match (usage.io_note, usage.buffered) {
        (Some(note), _) => Check::advice(WHAT, seen, format!("io_uring is not used: {note}")),
        (None, true) => Check::advice(
            WHAT,
            seen,
            "the file system has no O_DIRECT: use a directory on ext4 or XFS",
        ),
        (None, false) => Check::ok(WHAT, seen),
    }
}
