//! Settings that nobody has set: chosen from the facts of a machine when a runtime is created, and revised
//! between steps from what was measured. Each comes with its reason.
//!
//! - **T1** Every value lies between named limits, whatever the facts.
//! - **T2** No value depends on a total where only a part is free: memory counts as far as it is available.
//! - **T3** A value that is revised rises at once and falls only after [`FALL_STEPS`] steps that needed less,
//!   so steps that repeat within that many settle on one value.

mod chosen;
mod machine;
mod steady;
mod step;
#[cfg(test)]
mod tests;

pub use chosen::Chosen;
pub use machine::{
    Disk, DiskIo, FILE_ATTEMPTS_MAX, FILE_BYTES_START, FileSize, IO_THREADS_MAX, IO_THREADS_MIN,
    QUEUE_DEPTH_MAX, QUEUE_DEPTH_MIN, file_bytes, host_bytes, host_limit_bytes, io_threads,
    less_file_bytes, queue_depth,
};
pub use steady::{FALL_STEPS, Steady};
pub use step::{
    INFLIGHT_BYTES_MAX, INFLIGHT_BYTES_START, Step, WINDOW_LAYERS_MAX, WINDOW_LAYERS_START,
    inflight_bytes, window_layers,
};
