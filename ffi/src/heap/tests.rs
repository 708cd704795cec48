//! Owners of blocks, on the host and on the stand-in driver at a time.

use super::*;
use crate::params;

const PAGE_BYTES: usize = 2 << 20;
const TOTAL_BYTES: u64 = 256 << 20;
const GPU: i32 = 0;

/// PyTorch has one allocator for all GPUs of a process, and copies between them with kernels.
#[test]
fn gpus_of_a_process_access_each_others_memory() {
    standin::run_on_two_devices("gpus_of_a_process_access_each_others_memory", || {
        let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
        let _turn = standin.exclusive();
        let block = |gpu| {
            let heap = Heap::gpu(gpu).unwrap();
            // SAFETY: NULL is the default stream.
            let _known = heap.stream(unsafe { RawStream::new(std::ptr::null_mut()) }).unwrap();
            heap.allocate(3 * PAGE_BYTES, 1, 0, Fill::Any).unwrap().range.start
        };
        let blocks = [block(0), block(1), block(0)];
        for gpu in 0..2 {
            assert_eq!(
                blocks.map(|start| standin.is_accessible(gpu, start)),
                [true; 3],
                "GPU {gpu}"
            );
        }
    });
}

/// A thread in a layer and a tag of a GPU allocates host memory too: under the preload library all of it.
#[test]
fn a_block_belongs_to_layers_and_tags_of_its_own_device() {
    let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
    let _turn = standin.exclusive();
    let gpu = Heap::gpu(GPU).unwrap();
    let host = Heap::get_or_create(&params::in_effect().unwrap()).unwrap();
    // The first open arena of each has the same id.
    let arenas = [gpu, host].map(|heap| heap.allocator().arena_create().unwrap());
    let window = |arena| Window { scope: 9, arena: Some(arena), device: Some(gpu.device()) };
    let owner = |heap: &Heap| {
        // SAFETY: NULL is the default stream.
        let _known = heap.stream(unsafe { RawStream::new(std::ptr::null_mut()) }).unwrap();
        let block = heap.allocate(3 * PAGE_BYTES, 1, 0, Fill::Any).unwrap();
        let info = heap.block_at(block.range.start).unwrap();
        heap.free(block.range.start, 0).unwrap();
        (info.scope, info.tag, info.arena)
    };
    for arena in arenas {
        collect::set_window(window(arena));
        collect::enter_tag(5, gpu.device()).unwrap();
        assert_eq!(owner(host), (0, 0, None));
        collect::leave_tag(5).unwrap();
        collect::set_window(Window::NONE);
    }
    collect::set_window(window(arenas[0]));
    collect::enter_tag(5, gpu.device()).unwrap();
    assert_eq!(owner(gpu), (9, 5, Some(arenas[0])));
    collect::leave_tag(5).unwrap();
    collect::set_window(Window::NONE);
    for (heap, arena) in [gpu, host].into_iter().zip(arenas) {
        heap.allocator().arena_close(arena);
        heap.allocator().trim(u64::MAX);
    }
}
