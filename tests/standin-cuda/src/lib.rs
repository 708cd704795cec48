//! A stand-in for NVIDIA's `libcuda.so.1`, for machines with no GPU.
//!
//! Device memory is memory of this process, streams are threads of the host device. It is strict:
//! what the driver refuses it refuses, with the driver's code, and what would kill a context on a
//! GPU loses this one. It is not a simulator: kernels are counted, never run, and it says nothing
//! about speed.
//!
//! ```text
//!   cuX ──► entry (count, fault, loss, init, context) ──► what the entry point does
//!                                                          │
//!              memory: arena, memfd handles, pinned ◄──────┼──► streams, events ──► host device
//! ```
//!
//! # Glossary
//! - *arena*: the one range that all device addresses lie in; anything else is host memory.
//! - *handle*: physical memory, bytes of a sparse memory file, mapped at any number of addresses.
//! - *legacy stream*: stream 0, which blocking streams are ordered with.
//! - *graph*: what a captured stream was given, done again whenever it is launched.
//! - *point*: what a record of an event stands for.
//! - *work*: a copy, a kernel or a host function that a stream was given.
//! - *lost*: after an illegal access every entry point returns the code of the loss.
//!
//! # Invariants
//! - **D1** Nothing is touched on behalf of a copy unless both ends were found accessible under the
//!   same lock that unmapping takes.
//! - **D2** A refused call changes nothing.
//! - **D3** No handle value is ever used twice, so a stale one is always found.
//! - **D4** No lock is held while a stream's queue may have to be waited for.
//! - **D5** No panic crosses an entry point.
//!
//! # Environment
//! `STANDIN_CUDA_GRANULARITY_BYTES` (2 MiB unless set), `STANDIN_CUDA_TOTAL_BYTES` (8 GiB unless
//! set), `STANDIN_CUDA_DEVICES` (1 unless set; further ones share the total and the legacy stream, and have no `cuMemAlloc`), `STANDIN_CUDA_RUN_AHEAD` (0 unless set: works by which the host is ahead of the GPU, see `ahead`),
//! `STANDIN_CUDA_EXACT` (0 unless set; 1: the same answers in every run, see `ahead`),
//! `STANDIN_CUDA_WORK_NS` (0 unless set: what each work takes), `STANDIN_CUDA_COST_NS` (0 unless set: what calls that change the device's memory spin for),
//! `STANDIN_CUDA_COSTS` (a file: what such calls add to a virtual clock, see `cost`),
//! `STANDIN_CUDA_BACKED` (1 unless set; 0: device addresses are numbers, and a copy finds no access)
//! and `STANDIN_CUDA_FAIL` (`entry:nth:count:code`, comma-separated) are read by `cuInit`, the last
//! one by whichever entry point is called first. A value that is not understood fails `cuInit`.

mod ahead;
mod arena;
mod backing;
mod capture;
mod code;
mod context;
pub mod control;
mod copies;
mod cost;
mod device_info;
mod entry;
mod events;
mod faults;
mod graphs;
mod hold;
mod legacy;
mod memory;
mod modules;
mod pinned;
mod pointers;
mod runs;
mod space;
mod state;
mod streams;
mod system;
mod table;
mod vmm;
