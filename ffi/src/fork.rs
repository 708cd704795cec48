//! Forked children. A child has the parent's memory and none of its threads, so it cannot use the
//! library: its frees of our blocks are no-ops, its requests go to libc, and every function of the
//! header returns `DORMOUSE_ERR_FORKED`. Locks that the parent's threads held stay locked and are
//! never waited for (decision 0031).

use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use crate::torch::request_flags;

const IN_CHILD: u32 = 0;
const IN_PARENT: u32 = 1;

/// The word of [`WORD`] where the kernel refuses a page that it wipes.
static PLAIN: AtomicU32 = AtomicU32::new(IN_PARENT);
/// [`IN_PARENT`], or [`IN_CHILD`] in a child. It lies in a page that the kernel wipes in children, so that
/// it is right before any fork handler runs, and in children of `_Fork` and `clone`, which run none.
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const PLAIN).cast_mut());

/// The process that loaded the library.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// What to do in the parent before each fork. It does not panic.
static BEFORE: OnceLock<fn()> = OnceLock::new();

/// Before the program's threads, and before most fork handlers of others.
#[used]
#[unsafe(link_section = ".init_array")]
static WATCH: extern "C" fn() = watch;

/// Returns whether this process is a child that was forked after the library was loaded.
#[inline]
pub(crate) fn in_child() -> bool {
    word().load(Ordering::Relaxed) == IN_CHILD
}

/// Returns whether this process uses the memory of the one that loaded the library: between `vfork` and `exec`.
pub(crate) fn borrows_memory() -> bool {
    // SAFETY: getpid has no precondition.
    !in_child() && unsafe { libc::getpid() } != OWNER.load(Ordering::Relaxed)
}

/// Has `before` called in the parent before each fork from now on. The first one stays.
pub(crate) fn set_before(before: fn()) {
    let _first = BEFORE.set(before);
}

#[inline]
fn word() -> &'static AtomicU32 {
    // Acquire pairs with the release in `watch`.
    // SAFETY: `PLAIN`, or the page of `watch`, which is never unmapped.
    unsafe { &*WORD.load(Ordering::Acquire) }
}

// The constructors' code shares pages of the library: what a small program touches stays resident in it.
#[unsafe(link_section = ".text.constructor")]
extern "C" fn watch() {
    // SAFETY: getpid has no precondition.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    if let Some(page) = wiped_page() {
        // SAFETY: a zeroed, aligned, never unmapped page of our own.
        unsafe { (*page).store(IN_PARENT, Ordering::Relaxed) };
        WORD.store(page, Ordering::Release);
    }
    // SAFETY: the handlers catch panics or have none, and this library is never unloaded (`-z nodelete`).
    // A failure (no memory for a list entry) has no remedy.
    let _ignored = unsafe { libc::pthread_atfork(Some(prepare), None, Some(child)) };
}

/// Maps a page that is zero in children. `None` if the system refuses it.
fn wiped_page() -> Option<*mut AtomicU32> {
    // Rounded up to a page by the kernel.
    let bytes = size_of::<AtomicU32>();
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping affects no existing memory.
    let page = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping of above, which nothing else uses.
    unsafe {
        if libc::madvise(page, bytes, libc::MADV_WIPEONFORK) != 0 {
            libc::munmap(page, bytes);
            return None;
        }
    }
    Some(page.cast())
}

extern "C" fn prepare() {
    if let Some(before) = BEFORE.get().filter(|_| !in_child()) {
        before();
    }
}

extern "C" fn child() {
    word().store(IN_CHILD, Ordering::Relaxed);
    // The fast allocation path checks these flags only; set, they send every request to the slow one.
    request_flags::set_announced(false);
    // Open descriptors would keep the parent's disk space and pinned memory after its end.
    dormouse_storage::close_in_child();
}
