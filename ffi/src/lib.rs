//! libdormouse: the C API, the heaps of the process, and everything else that exists once per process.
//!
//! It turns C calls into calls of the crates behind it, and their errors into a status with a message.
//! It has no policy: `offload` decides what sleeps, `schedule` what runs next, `alloc` where memory
//! comes from. Nothing here is public in Rust; the interface is `ffi/include/dormouse.h`.
//!
//! # Glossary
//! - *handle*: an opaque value that C holds (`handles`).
//! - *mode*: how memory is requested: linked (`dormouse_mem_alloc`) or preload (`malloc`).
//! - *heap*: the allocator of one device, which both modes use (`heap`).
//! - *runtime*: a heap with its tiers, from create to destroy (`runtime`).
//! - *window*: the interval between a layer's forward marks, in which blocks that its thread
//!   allocates belong to the layer (`collect`).
//! - *record*: one log event, written to a file or returned by `dormouse_log_read` (`log`).
//! - *live figures*: statistics in a file that other processes read (`live`).
//! - *dump*: a page with the timeline, which a thread writes unasked where memory runs out, at exit or on request (`dumps`).
//! - *fault*: the status and message of a failed call (`fault`).
//!
//! # Drawing
//! ```text
//!   C caller ──► abi ──► boundary::enter ──► runtime, prefix ──► offload ─┐
//!                 │      (panics, forks)     op, plan_* ──► schedule      ├─► alloc ─► device
//!                 └──► handles, params                                    │
//!   malloc ──► preload library ──► heap::symbols ─────────────────────────┘
//! ```
//! Modules do not import each other in cycles (`tests/tests/modules.rs`).
//!
//! # Invariants
//! - **I1** No panic crosses into C; results are written on success only.
//! - **I2** A handle is looked up, never dereferenced; a destroyed one stays destroyed.
//! - **I3** The library allocates past the interposed `malloc`, so it cannot re-enter it.
//! - **I4** At most one heap per device, never destroyed; at most one runtime per device.
//! - **I5** The `malloc` path parses no environment, uses no thread-local with a destructor and takes
//!   only the allocator's short locks; `free` never waits.
//! - **I6** A forked child waits for no lock.
//! - **I7** Memory that a graph replays on is reserved for it and stays awake (`torch::captures`).

mod abi;
mod allocation_log;
mod boundary;
mod collect;
mod convert;
mod device;
mod dumps;
mod fault;
mod files;
mod fork;
mod handles;
mod heap;
mod host;
mod ids;
mod live;
mod log;
mod op;
mod params;
mod plan_options;
mod plan_prefixes;
mod prefix;
mod runtime;
mod spare;
mod status;
mod stderr;
mod system;
mod torch;

// Sanitizer builds use `malloc`: a sanitizer must see when memory is reused.
#[cfg_attr(not(sanitized), global_allocator)]
static SYSTEM: system::System = system::System;

/// Version of the crate: major * 1000000 + minor * 1000 + patch.
const VERSION_NUMBER: u32 = packed(env!("CARGO_PKG_VERSION").as_bytes());

const fn packed(version: &[u8]) -> u32 {
    let mut packed = 0;
    let mut part = 0;
    let mut at = 0;
    while at < version.len() {
        match version[at] {
            b'.' => {
                packed = (packed + part) * 1000;
                part = 0;
            }
            digit @ b'0'..=b'9' => part = part * 10 + (digit - b'0') as u32,
            _ => break,
        }
        at += 1;
    }
    packed + part
}

#[cfg(test)]
mod tests {
    #[test]
    fn versions_are_packed() {
        assert_eq!(super::packed(b"0.1.0"), 1000);
        assert_eq!(super::packed(b"12.34.56-rc1"), 12_034_056);
    }
}
