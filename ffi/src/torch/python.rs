//! The Python stack of an allocation, through functions that CPython exports.
//!
//! A stack is a number: that of its innermost frame in a table of frames, each with the number of its caller's. Equal
//! stacks are one entry. A frame is a code object and an offset in it; file and line are looked up by who reads them.
//!
//! Reading a stack takes Python's global lock, as PyTorch's own allocator does for its history, and no lock of ours at
//! that moment. A thread that holds another lock for which the holder of Python's lock waits would wait for ever:
//! stacks are off unless asked for.

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use dormouse_device::sync::Mutex;

/// Limit of the frames of one stack, the innermost ones.
pub(crate) const STACK_FRAMES_MAX: usize = 128;
/// Limit of the frames in the table (16 MiB). Further stacks are cut to what is there.
pub(crate) const FRAMES_MAX: usize = 1 << 18;

/// A frame: a code object, which the table keeps alive, the offset of its instruction, and the number of the frame that
/// called it, 0 if none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Frame {
    pub(crate) code: usize,
    pub(crate) offset: c_int,
    pub(crate) caller: u32,
}

type Object = *mut c_void;

/// Functions of CPython 3.11 and later.
#[derive(Clone, Copy)]
struct Python {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    take_lock: unsafe extern "C" fn() -> c_int,
    give_lock: unsafe extern "C" fn(c_int),
    frame: unsafe extern "C" fn() -> Object,
    caller: unsafe extern "C" fn(Object) -> Object,
    code: unsafe extern "C" fn(Object) -> Object,
    offset: unsafe extern "C" fn(Object) -> c_int,
    keep: unsafe extern "C" fn(Object),
    release: unsafe extern "C" fn(Object),
}

static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
/// `None` until the first stack. Never held while Python runs.
static FRAMES: Mutex<Option<Frames>> = Mutex::new(None);

#[derive(Default)]
struct Frames {
    /// Frame `n` is number `n + 1`.
    all: Vec<Frame>,
    numbers: HashMap<Frame, u32, BuildHasherDefault<Mixer>>,
}

/// Mixes the three words of a frame. They are no one's to choose.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_i32(&mut self, word: i32) {
        self.write_u64(word.cast_unsigned().into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Whether this process has a Python whose stacks can be read.
pub(crate) fn is_readable() -> bool {
    python().is_some()
}

fn python() -> Option<Python> {
    *PYTHON.get_or_init(Python::of_this_process)
}

/// Returns the number of the calling thread's Python stack; 0 if it has none.
pub(super) fn stack() -> u32 {
    let Some(python) = python() else { return 0 };
    // SAFETY: functions of the interpreter in this process.
    unsafe { python.stack() }
}

/// Returns all frames of the table.
pub(crate) fn frames() -> Vec<Frame> {
    FRAMES.lock().as_ref().map(|frames| frames.all.clone()).unwrap_or_default()
}

impl Python {
    fn of_this_process() -> Option<Self> {
        // SAFETY: each name is that of a function of the type of its field (CPython's stable or public API).
        unsafe {
            Some(Self {
                is_initialized: function(c"Py_IsInitialized")?,
                // Its name before Python 3.13 comes second.
                is_finalizing: function(c"Py_IsFinalizing")
                    .or_else(|| function(c"_Py_IsFinalizing"))?,
                take_lock: function(c"PyGILState_Ensure")?,
                give_lock: function(c"PyGILState_Release")?,
                frame: function(c"PyEval_GetFrame")?,
                caller: function(c"PyFrame_GetBack")?,
                code: function(c"PyFrame_GetCode")?,
                offset: function(c"PyFrame_GetLasti")?,
                keep: function(c"Py_IncRef")?,
                release: function(c"Py_DecRef")?,
            })
        }
    }

    /// Returns the number of the calling thread's stack; 0 if it has none, and while the interpreter starts or ends.
    ///
    /// # Safety
    /// The functions are those of an interpreter.
    unsafe fn stack(&self) -> u32 {
        // SAFETY: the caller's contract; the stack is read with the lock held.
        unsafe {
            // Python ends a thread that waits for the lock at its own end, by `pthread_exit`: that unwinds, and our
            // frames do not.
            if (self.is_initialized)() == 0 || (self.is_finalizing)() != 0 {
                return 0;
            }
            let state = (self.take_lock)();
            let number = self.read_stack();
            (self.give_lock)(state);
            number
        }
    }

    /// # Safety
    /// The calling thread holds Python's lock.
    unsafe fn read_stack(&self) -> u32 {
        let mut found = [const { MaybeUninit::<(Object, c_int)>::uninit() }; STACK_FRAMES_MAX];
        let mut count = 0;
        // SAFETY: the caller's contract. `frame` is borrowed or null; the others are references of ours, and
        // given up.
        unsafe {
            let mut frame = (self.frame)();
            (self.keep)(frame);
            while !frame.is_null() && count < STACK_FRAMES_MAX {
                found[count].write(((self.code)(frame), (self.offset)(frame)));
                count += 1;
                let caller = (self.caller)(frame);
                (self.release)(frame);
                frame = caller;
            }
            (self.release)(frame);
        }
        let mut number = 0;
        let mut known = [false; STACK_FRAMES_MAX];
        {
            let mut frames = FRAMES.lock();
            let frames = frames.get_or_insert_with(Frames::default);
            for at in (0..count).rev() {
                // SAFETY: written above.
                let (code, offset) = unsafe { found[at].assume_init() };
                let frame = Frame { code: code.expose_provenance(), offset, caller: number };
                let is_new;
                (number, is_new) = frames.number(frame);
                known[at] = !is_new;
            }
        }
        for (at, _) in known.iter().enumerate().take(count).filter(|&(_, &is_known)| is_known) {
            // SAFETY: as above; the table keeps the reference of a new frame.
            unsafe { (self.release)(found[at].assume_init().0) };
        }
        number
    }
}

impl Frames {
    /// Returns the number of `frame`, and whether it is new. Where the table is full, that of its caller.
    fn number(&mut self, frame: Frame) -> (u32, bool) {
        if let Some(&number) = self.numbers.get(&frame) {
            return (number, false);
        }
        if self.all.len() >= FRAMES_MAX {
            return (frame.caller, false);
        }
        self.all.push(frame);
        // At most `FRAMES_MAX`.
        let number = self.all.len() as u32;
        self.numbers.insert(frame, number);
        (number, true)
    }
}

/// # Safety
/// `F` is the type of the function of that name.
unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a NUL-terminated name; a function pointer, of the type that the caller names.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        (!found.is_null()).then(|| std::mem::transmute_copy(&found))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_process_without_python_has_no_stacks() {
        assert!(!is_readable());
        assert_eq!((stack(), frames()), (0, Vec::new()));
    }

    #[test]
    fn the_lock_of_an_interpreter_that_starts_or_ends_is_not_taken() {
        static LOCKS_TAKEN: AtomicU32 = AtomicU32::new(0);
        extern "C" fn no() -> c_int {
            0
        }
        extern "C" fn yes() -> c_int {
            1
        }
        extern "C" fn take_lock() -> c_int {
            LOCKS_TAKEN.fetch_add(1, Ordering::Relaxed).cast_signed()
        }
        extern "C" fn give_lock(_: c_int) {}
        extern "C" fn no_frame() -> Object {
            std::ptr::null_mut()
        }
        extern "C" fn no_caller(_: Object) -> Object {
            std::ptr::null_mut()
        }
        extern "C" fn no_offset(_: Object) -> c_int {
            0
        }
        extern "C" fn nothing(_: Object) {}
        let running = Python {
            is_initialized: yes,
            is_finalizing: no,
            take_lock,
            give_lock,
            frame: no_frame,
            caller: no_caller,
            code: no_caller,
            offset: no_offset,
            keep: nothing,
            release: nothing,
        };
        for (python, locks) in [
            (Python { is_finalizing: yes, ..running }, 0),
            (Python { is_initialized: no, ..running }, 0),
            (running, 1),
        ] {
            // SAFETY: the functions above.
            assert_eq!(unsafe { python.stack() }, 0);
            assert_eq!(LOCKS_TAKEN.load(Ordering::Relaxed), locks);
        }
    }

    #[test]
    fn equal_stacks_are_one_and_callers_tell_frames_apart() {
        let mut frames = Frames::default();
        let frame = |code, offset, caller| Frame { code, offset, caller };
        let (main, is_new) = frames.number(frame(10, 2, 0));
        assert_eq!((main, is_new), (1, true));
        let (first, _) = frames.number(frame(20, 4, main));
        assert_eq!(frames.number(frame(20, 4, main)), (first, false));
        let (other, is_new) = frames.number(frame(20, 6, main));
        assert!(is_new && other != first);
        assert!(frames.number(frame(20, 4, other)).1);
        assert_eq!(frames.all[first as usize - 1].caller, main);
    }

    #[test]
    fn a_full_table_cuts_stacks() {
        let mut frames = Frames::default();
        for code in 0..FRAMES_MAX {
            assert!(frames.number(Frame { code, offset: 0, caller: 0 }).1);
        }
        assert_eq!(frames.number(Frame { code: FRAMES_MAX, offset: 0, caller: 9 }), (9, false));
        assert_eq!(frames.number(Frame { code: 5, offset: 0, caller: 0 }), (6, false));
    }
}
