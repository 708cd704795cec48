//! The end of a range under every interleaving of threads that lower it and threads that map what has left.
//!
//! The file is compiled a second time here, over loom's atomics. The kernel is a lock around the owners of pages.
#![allow(dead_code, unreachable_pub, reason = "the copy is used in part")]

#[path = "end.rs"]
mod end;
mod guard {
    pub(super) mod sync {
        pub(in super::super) use loom::sync::atomic::{AtomicUsize, Ordering};
    }
}

use loom::sync::{Arc, Mutex};
use loom::thread;

use end::End;
use guard::sync::{AtomicUsize, Ordering};

const PAGES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Range,
    Unmapped,
    Other,
}

struct World {
    /// What the preload library reads.
    published: AtomicUsize,
    end: End,
    kernel: Mutex<[Owner; PAGES]>,
}

impl World {
    /// As `HostDevice::shrink` and its caller do.
    fn shrink(&self, end: usize) {
        self.published.fetch_min(end, Ordering::Relaxed);
        let left = self.end.lower(end);
        let mut owners = self.kernel.lock().unwrap();
        for owner in &mut owners[left.start..left.end()] {
            assert_eq!(*owner, Owner::Range, "unmapped twice, or unmapped under its owner");
            *owner = Owner::Unmapped;
        }
    }

    /// Maps any free page, and checks whose it seems.
    fn map_and_check(&self) {
        let found = {
            let mut owners = self.kernel.lock().unwrap();
            let found = owners.iter().rposition(|owner| *owner == Owner::Unmapped);
            if let Some(page) = found {
                owners[page] = Owner::Other;
            }
            found
        };
        if let Some(page) = found {
            assert!(page >= self.published.load(Ordering::Relaxed), "page {page} seems ours");
            assert!(page >= self.end.get(), "page {page} seems ours to the device");
        }
    }
}

#[test]
fn loom_memory_of_others_is_never_taken_for_ours() {
    loom::model(|| {
        let world = Arc::new(World {
            published: AtomicUsize::new(PAGES),
            end: End::new(PAGES),
            kernel: Mutex::new([Owner::Range; PAGES]),
        });
        let threads = [2, 1].map(|end| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.shrink(end))
        });
        world.map_and_check();
        world.map_and_check();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(world.end.get(), 1);
    });
}
