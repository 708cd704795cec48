//! Operations on an allocator whose blocks share pages, held against the shadow of
//! `tests/packed_model.rs`. Any bytes are operations: see `tests/common/packed/ops.rs`.
#![no_main]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a finding is a panic")]

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/common/packed/mod.rs"]
mod packed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    packed::Shadow::run(bytes);
});
