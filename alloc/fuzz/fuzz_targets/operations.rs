//! Operations on an allocator whose blocks share pages, held against the shadow of
//! `tests/suite/packed_model.rs`. Any bytes are operations: see `tests/suite/packed_shadow/ops.rs`.
#![no_main]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a finding is a panic")]

#[path = "../../tests/suite/common/mod.rs"]
mod common;
#[path = "../../tests/suite/packed_shadow/mod.rs"]
mod packed_shadow;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    packed_shadow::Shadow::run(bytes);
});
