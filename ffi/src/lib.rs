//! libdormouse: the C boundary, the process' heap, and everything that is one per process.
//!
//! It turns C calls into calls of the rooms behind it and their errors into statuses with a
//! sentence. It is not a place for policy: what sleeps is `offload`'s, what runs next is
//! `schedule`'s, where memory comes from is `alloc`'s. Nothing here is public in Rust; the
//! interface is `ffi/include/dormouse.h`.
//!
//! # Glossary
//! - *handle*: an opaque value that C holds (`handles`).
//! - *mode*: how memory is requested: linked (`dormouse_mem_alloc`) or preload (`malloc`).
//! - *heap*: the one allocator of the process, which both modes use (`heap`).
//! - *runtime*: the heap with its tiers, from create to destroy (`runtime`).
//! - *window*: the interval between a layer's forward marks, in which blocks that its thread
//!   allocates belong to the layer (`collect`).
//! - *record*: one log event, on its way to a file or to `dormouse_log_read` (`log`).
//! - *fault*: the status and message of a failed call (`fault`).
//!
//! # Drawing
//! ```text
//!   C caller ──► abi::v1 ──► boundary::enter ──► runtime, tag, node ──► offload ─┐
//!                   │        (panics, forks)     plan, forest ──► schedule       ├─► alloc ─► device
//!                   └──► handles, params         merge ──► kernels               │
//!   malloc ──► preload shim ──► heap::symbols ───────────────────────────────────┘
//! ```
//!
//! # Invariants
//! - **I1** No panic crosses into C; results are written on success only.
//! - **I2** A handle is looked up, never dereferenced; a destroyed one stays destroyed.
//! - **I3** The library allocates for itself past the interposed `malloc`, so no path of it can
//!   re-enter it.
//! - **I4** At most one heap, never unmade; at most one runtime per device.
//! - **I5** On the `malloc` path there is no environment to parse, no thread-local with a
//!   destructor and no lock but the allocator's short one; `free` never waits.
//! - **I6** In a forked child nothing here takes a lock.
//! - **I7** What a graph may replay on is nobody else's and stays awake (`torch::captures`).

mod abi;
mod boundary;
mod collect;
mod convert;
mod device;
mod fault;
mod forest;
mod fork;
mod handles;
mod heap;
mod log;
mod merge;
mod note;
mod op;
mod params;
mod plan;
mod plan_options;
mod plan_prefixes;
mod prefix;
mod runtime;
mod status;
mod system;
mod tag;
mod torch;

#[global_allocator]
static SYSTEM: system::System = system::System;

/// major * 1000000 + minor * 1000 + patch.
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
