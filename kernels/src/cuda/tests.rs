use std::ffi::c_void;

use super::kernel::{
    ACCUMULATE_BLOCK_THREADS, MERGE_BLOCK_ROWS, MERGE_BLOCK_THREADS, VECTOR_BYTES,
};
use super::*;
use crate::check::ELEMENTS_MAX;
use crate::{DType, Empty, KernelError, LogBase, MergeArgs};

const HEADER: &str = include_str!("../../cuda/common.cuh");
const REPORT: &str = include_str!("../../cuda/dormouse_kernels.json");

#[test]
fn fatbin_has_a_valid_aligned_header() {
    let magic = 0xba55_ed50u32.to_le_bytes();
    assert_eq!(FATBIN[..4], magic);
    assert!(FATBIN.as_ptr().addr().is_multiple_of(16));
    let header_bytes = u16::from_le_bytes([FATBIN[6], FATBIN[7]]);
    let payload_bytes = u64::from_le_bytes(FATBIN[8..16].try_into().unwrap());
    assert_eq!(header_bytes as u64 + payload_bytes, FATBIN.len() as u64);
}

#[test]
fn ptx_is_terminated_and_of_the_version_in_the_report() {
    let text = std::str::from_utf8(PTX).unwrap().strip_suffix('\0').unwrap();
    let (_, version) = REPORT.split_once("\"version\": \"").unwrap();
    let version = version.split('"').next().unwrap();
    assert!(text.contains(&format!("\n.version {version}\n")), "{version}");
    for kernel in Kernel::ALL {
        let name = kernel.name().to_str().unwrap();
        assert!(text.contains(&format!(".entry {name}(")), "{name}");
    }
}

/// The code is compressed, so names are searched in the build's report; `scripts/build-kernels --check`
/// compares the report with the binary.
#[test]
fn report_lists_each_kernel_for_each_architecture() {
    let (_, compiled) = REPORT.split_once("\"kernels\": {").unwrap();
    let kernels: Vec<&str> = compiled.split("\"dormouse_").skip(1).collect();
    for kernel in Kernel::ALL {
        let name = kernel.name().to_str().unwrap().strip_prefix("dormouse_").unwrap();
        let figures = kernels.iter().find(|text| text.starts_with(&format!("{name}\": {{")));
        for arch in ["sm_80", "sm_90", "sm_100"] {
            assert!(figures.unwrap().contains(&format!("\"{arch}\": {{")), "{name} {arch}");
        }
    }
    assert_eq!(kernels.len(), Kernel::ALL.len());
}

#[test]
fn discriminants_are_positions_in_all() {
    for (place, kernel) in Kernel::ALL.into_iter().enumerate() {
        assert_eq!(kernel as usize, place);
    }
}

#[test]
fn constants_equal_those_of_the_cuda_header() {
    for (name, value) in [
        ("ACCUMULATE_BLOCK_THREADS", u64::from(ACCUMULATE_BLOCK_THREADS)),
        ("MERGE_BLOCK_THREADS", u64::from(MERGE_BLOCK_THREADS)),
        ("MERGE_BLOCK_ROWS", MERGE_BLOCK_ROWS),
        ("VECTOR_BYTES", VECTOR_BYTES),
        ("BASE_TWO", LogBase::Two as u64),
        ("EMPTY_PLUS_INFINITY", Empty::PlusInfinity as u64),
    ] {
        assert!(HEADER.contains(&format!("constexpr u32 {name} = {value};\n")), "{name}");
    }
}

#[test]
fn grids_cover_all_items_within_the_limit() {
    for kernel in Kernel::ALL {
        let round = kernel.items_per_block();
        assert_eq!(kernel.grid_for(0), 0);
        assert_eq!(kernel.grid_for(1), 1);
        assert_eq!(kernel.grid_for(round), 1);
        assert_eq!(kernel.grid_for(round + 1), 2);
        let full = round * u64::from(BLOCKS_MAX);
        assert_eq!(kernel.grid_for(full - round), BLOCKS_MAX - 1);
        for items in [full, full + 1, ELEMENTS_MAX, u64::MAX] {
            assert_eq!(kernel.grid_for(items), BLOCKS_MAX, "{kernel:?} {items}");
        }
    }
    assert_eq!(Kernel::AccumulateBf16.items_per_block(), 1024);
    assert_eq!(Kernel::AccumulateF32.items_per_block(), 1024);
    assert_eq!(Kernel::AccumulateF64.items_per_block(), 512);
}

#[test]
fn accumulate_parameters_are_in_kernel_order() {
    let launch = Launch::accumulate(0x7f01_0203_0400, 0x7f05_0607_0802, 5000, DType::Bf16);
    let launch = launch.unwrap().unwrap();
    assert_eq!(launch.kernel, Kernel::AccumulateBf16);
    assert_eq!((launch.blocks, launch.kernel.block_threads()), (5, 256));
    let wanted = [0x7f01_0203_0400, 0x7f05_0607_0802, 5000, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(launch.parameters, wanted);
}

/// Rows of 64 FP32 elements, buffer by buffer from `0x10_0000` on, in steps of that.
fn args(rows: u64) -> MergeArgs {
    let at = |buffer: usize| std::ptr::without_provenance_mut::<c_void>(buffer << 20);
    MergeArgs {
        out1: at(1),
        lse1: at(2),
        out2: at(3),
        lse2: at(4),
        out: at(5),
        lse: at(6),
        rows,
        head_dim: 64,
        dtype: DType::F32,
        base: LogBase::Two,
        empty: Empty::MinusInfinity,
    }
}

#[test]
fn merge_parameters_are_in_kernel_order() {
    let launch = Launch::merge_lse(&args(100)).unwrap().unwrap();
    assert_eq!(launch.kernel, Kernel::MergeLseF32);
    assert_eq!((launch.blocks, launch.kernel.block_threads()), (4, 128));
    let addresses = [1, 2, 3, 4, 5, 6].map(|buffer| buffer << 20);
    assert_eq!(launch.parameters[..6], addresses);
    assert_eq!(launch.parameters[6..], [100, 64, 1, 0]);

    let plus = MergeArgs { empty: Empty::PlusInfinity, base: LogBase::E, ..args(1) };
    let launch = Launch::merge_lse(&plus).unwrap().unwrap();
    assert_eq!(launch.parameters[6..], [1, 64, 0, 1]);
    for (dtype, kernel) in [
        (DType::F16, Kernel::MergeLseF16),
        (DType::Bf16, Kernel::MergeLseBf16),
        (DType::F32, Kernel::MergeLseF32),
        (DType::F64, Kernel::MergeLseF64),
    ] {
        let launch = Launch::merge_lse(&MergeArgs { dtype, ..args(33) }).unwrap().unwrap();
        assert_eq!((launch.kernel, launch.blocks), (kernel, 2));
    }
}

#[test]
fn nothing_to_do_is_no_launch() {
    assert_eq!(Launch::accumulate(0, 0, 0, DType::F16), Ok(None));
    assert_eq!(Launch::merge_lse(&args(0)), Ok(None));
    // Rows without elements still have log-sum-exps.
    let launch = Launch::merge_lse(&MergeArgs { head_dim: 0, ..args(1) });
    assert!(launch.unwrap().is_some());
}

#[test]
fn arguments_that_the_cpu_refuses_are_refused() {
    let add = |to, from, elems| Launch::accumulate(to, from, elems, DType::F32).unwrap_err();
    let address = |what, address| KernelError::Address { what, address, align: 4 };
    assert_eq!(add(0, 64, 1), address("accumulator", 0));
    assert_eq!(add(64, 6, 1), address("gradient", 6));
    assert_eq!(add(64, usize::MAX - 3, 1), address("gradient", usize::MAX - 3));
    let overlap = |what, other| KernelError::Overlap { what, other };
    assert_eq!(add(64, 64, 1), overlap("accumulator", "gradient"));
    let limit = ELEMENTS_MAX as usize;
    assert_eq!(add(64, 64, limit), KernelError::TooLarge { rows: limit, head_dim: 1 });

    let merge = |args| Launch::merge_lse(&args).unwrap_err();
    let lse1 = args(1).lse1.wrapping_byte_add(2);
    let half = MergeArgs { dtype: DType::F16, lse1, ..args(1) };
    assert_eq!(merge(half), address("first lse", lse1.addr()));
    let (base, one) = (args(2), args(2).out1.cast_mut());
    let shifted = MergeArgs { out: one.wrapping_byte_add(16), ..base };
    assert_eq!(merge(shifted), overlap("out", "first out"));
    assert_eq!(merge(MergeArgs { lse: one, ..base }), overlap("lse", "first out"));
    let crossed = MergeArgs { out: base.lse2.cast_mut(), ..base };
    assert_eq!(merge(crossed), overlap("out", "second lse"));
    assert_eq!(merge(MergeArgs { lse: base.out, ..base }), overlap("out", "lse"));
}

#[test]
fn a_merge_may_be_in_the_place_of_either_part() {
    let base = args(2);
    for (out, lse) in [(base.out1, base.lse1), (base.out2, base.lse2), (base.out1, base.lse2)] {
        let args = MergeArgs { out: out.cast_mut(), lse: lse.cast_mut(), ..base };
        assert!(Launch::merge_lse(&args).unwrap().is_some());
        // A partial overlap is refused.
        let args = MergeArgs { lse: lse.cast_mut().wrapping_byte_add(4), ..args };
        assert!(Launch::merge_lse(&args).is_err());
    }
}
