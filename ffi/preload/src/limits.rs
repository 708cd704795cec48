//! setrlimit(2) and prlimit(2). The reservation of the heap counts against a limit of address space, so the library
//! gives back what it can before such a limit falls.
#![allow(unreachable_pub, reason = "symbols of the library, called by programs")]

use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{pid_t, rlimit};

use crate::family;
use crate::library;

type Resource = libc::__rlimit_resource_t;
type Setrlimit = unsafe extern "C" fn(Resource, *const rlimit) -> c_int;
type Prlimit = unsafe extern "C" fn(pid_t, Resource, *const rlimit, *mut rlimit) -> c_int;

/// A function of the same name as ours, behind this library in the order of symbols.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(null_mut()) }
    }

    /// Returns the function; null if there is none. It is looked up once, by the constructor: the loader's lock may
    /// be held in a forked child.
    fn get(&self) -> *mut c_void {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = family::next(self.name);
            self.found.store(found, Ordering::Relaxed);
        }
        found
    }
}

static SETRLIMIT: Next = Next::new(c"setrlimit");
static SETRLIMIT64: Next = Next::new(c"setrlimit64");
static PRLIMIT: Next = Next::new(c"prlimit");
static PRLIMIT64: Next = Next::new(c"prlimit64");

/// Looks up the functions. Called by the constructor.
pub(crate) fn find() {
    for next in [&SETRLIMIT, &SETRLIMIT64, &PRLIMIT, &PRLIMIT64] {
        next.get();
    }
}

/// Tells the library about a limit that is about to be set.
fn announce(pid: pid_t, resource: Resource, limit: *const rlimit) {
    if resource != libc::RLIMIT_AS || limit.is_null() || !library::is_found() {
        return;
    }
    // SAFETY: getpid has no precondition; the range is published, and the library checks the pointer.
    unsafe {
        if pid == 0 || pid == libc::getpid() {
            (library::functions().limit)(limit.cast());
        }
    }
}

fn missing() -> c_int {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

/// # Safety
/// As setrlimit(2).
unsafe fn set(next: &Next, resource: Resource, limit: *const rlimit) -> c_int {
    announce(0, resource, limit);
    let found = next.get();
    if found.is_null() {
        return missing();
    }
    // SAFETY: the signature of setrlimit(2), and the caller's contract.
    unsafe { transmute::<*mut c_void, Setrlimit>(found)(resource, limit) }
}

/// # Safety
/// As prlimit(2).
unsafe fn set_and_get(
    next: &Next,
    pid: pid_t,
    resource: Resource,
    limit: *const rlimit,
    old: *mut rlimit,
) -> c_int {
    announce(pid, resource, limit);
    let found = next.get();
    if found.is_null() {
        return missing();
    }
    // SAFETY: the signature of prlimit(2), and the caller's contract.
    unsafe { transmute::<*mut c_void, Prlimit>(found)(pid, resource, limit, old) }
}

/// setrlimit(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit(resource: Resource, limit: *const rlimit) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { set(&SETRLIMIT, resource, limit) }
}

/// setrlimit(2): `struct rlimit64` is the same on a 64-bit system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit64(resource: Resource, limit: *const rlimit) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { set(&SETRLIMIT64, resource, limit) }
}

/// prlimit(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit(
    pid: pid_t,
    resource: Resource,
    limit: *const rlimit,
    old: *mut rlimit,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { set_and_get(&PRLIMIT, pid, resource, limit, old) }
}

/// prlimit(2), as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit64(
    pid: pid_t,
    resource: Resource,
    limit: *const rlimit,
    old: *mut rlimit,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { set_and_get(&PRLIMIT64, pid, resource, limit, old) }
}
