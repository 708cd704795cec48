use std::ffi::CStr;

use super::*;
use crate::status::*;

fn options() -> c::dormouse_options_t {
    let size = size_of::<c::dormouse_options_t>() as u32;
    c::dormouse_options_t { size, version: 1, ..c::dormouse_options_t::default() }
}

fn last() -> String {
    // SAFETY: this thread's own NUL-terminated buffer.
    unsafe { CStr::from_ptr(fault::last_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn a_panic_becomes_a_status_with_its_text() {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let status = enter(|| -> Result<(), Fault> { panic!("seven is {}", 7) });
    std::panic::set_hook(quiet);
    assert_eq!(status, DORMOUSE_ERR_PANIC);
    assert!(last().contains("seven is 7"), "{}", last());
}

#[test]
fn a_notice_keeps_its_reason() {
    let notice = |status, reason: &str| enter(|| Ok(Outcome::Notice(status, reason.to_owned())));
    assert_eq!(notice(DORMOUSE_DECLINED, "disk full"), DORMOUSE_DECLINED);
    assert_eq!(last(), "disk full");
    assert_eq!(notice(DORMOUSE_END, "no more"), DORMOUSE_END);
    assert_eq!(last(), "no more");
}

#[test]
fn versions_and_sizes_are_checked() {
    let read = |it: &c::dormouse_options_t| {
        // SAFETY: a live local, whose size is correct or refused before a read.
        unsafe { In::structure(&raw const *it, "options") }.map_err(|f| (f.status, f.message))
    };
    assert!(read(&options()).is_ok());
    let mut it = options();
    it.version = 7;
    let (status, message) = read(&it).unwrap_err();
    assert_eq!(status, DORMOUSE_ERR_VERSION);
    assert!(message.contains("version 7; accepted: 1"), "{message}");
    // Invalid sizes are refused before bytes past the struct are read.
    for size in [0, 12, 71, 4097, u32::MAX] {
        let mut it = options();
        it.size = size;
        let (status, message) = read(&it).unwrap_err();
        assert_eq!(status, DORMOUSE_ERR_VERSION);
        let accepted = format!("size {size}; accepted: 72 to 4096");
        assert!(message.contains(&accepted), "{message}");
    }
}

#[test]
fn unknown_fields_of_a_longer_struct_must_be_zero() {
    #[repr(C)]
    struct Newer {
        known: c::dormouse_options_t,
        later: u64,
    }
    let mut it = Newer { known: options(), later: 0 };
    it.known.size = size_of::<Newer>() as u32;
    // SAFETY: `Newer` is readable for its `size`.
    let ok = unsafe { In::structure((&raw const it).cast::<c::dormouse_options_t>(), "options") };
    assert!(ok.is_ok());
    it.later = 1;
    // SAFETY: as above.
    let no = unsafe { In::structure((&raw const it).cast::<c::dormouse_options_t>(), "options") };
    assert_eq!(no.unwrap_err().status, DORMOUSE_ERR_VERSION);
}

#[test]
fn the_size_of_a_result_has_two_limits() {
    let mut it = c::dormouse_op_t { version: 1, ..c::dormouse_op_t::default() };
    for (size, is_accepted) in [(7, false), (8, true), (4096, true), (4097, false)] {
        it.size = size;
        // SAFETY: a live local; only its header is read.
        let out = unsafe { Out::sized(&raw mut it, "op") };
        assert_eq!(out.is_ok(), is_accepted, "{size}");
        let message = out.err().map_or_else(String::new, |fault| fault.message.into_owned());
        assert!(is_accepted || message.contains("accepted: 8 to 4096"), "{message}");
    }
}

#[test]
fn text_without_a_nul_is_refused_at_the_limit() {
    let text = [b'a'; TEXT_BYTES_MAX + 1];
    // SAFETY: readable up to the limit, which is as far as it is read.
    let fault = unsafe { In::text(text.as_ptr().cast(), "path") }.unwrap_err();
    assert_eq!(fault.message, "path has more than 4096 bytes; accepted: at most 4096 and a NUL");
    // SAFETY: a literal.
    let fault = unsafe { In::text(c"\xff".as_ptr(), "path") }.unwrap_err();
    assert_eq!(fault.message, "path is \"\\xff\"; accepted: UTF-8");
}

#[test]
fn an_older_caller_gets_only_its_own_fields() {
    let default = c::dormouse_op_t::default();
    let mut it = c::dormouse_op_t { size: 24, version: 1, token_begin: 99, ..default };
    // SAFETY: a live local that is larger than its `size`.
    let out = unsafe { Out::sized(&raw mut it, "op") }.unwrap();
    out.fill(c::dormouse_op_t { id: 5, kind: 2, token_begin: 7, ..default });
    assert_eq!((it.size, it.version, it.id, it.kind), (24, 1, 5, 2));
    assert_eq!(it.token_begin, 99, "past the caller's size");
}

#[test]
fn null_and_misaligned_pointers_are_named() {
    // SAFETY: NULL is allowed.
    let fault = unsafe { Out::<u64>::new(std::ptr::null_mut(), "bytes_out") }.unwrap_err();
    assert_eq!(fault.status, DORMOUSE_ERR_NULL);
    assert!(fault.message.contains("bytes_out"));
    let odd = std::ptr::without_provenance_mut::<u64>(0x1001);
    // SAFETY: refused before a write.
    let fault = unsafe { Out::<u64>::new(odd, "bytes_out") }.unwrap_err();
    assert_eq!(fault.status, DORMOUSE_ERR_ARGUMENT);
}

#[test]
fn a_null_buffer_queries_the_length_of_a_text() {
    let mut needed = 0_u64;
    // SAFETY: a live local.
    let out = unsafe { Out::new(&raw mut needed, "needed_out") }.unwrap();
    // SAFETY: NULL queries the length.
    unsafe { out.text("abc".to_owned(), std::ptr::null_mut(), 0) }.unwrap();
    assert_eq!(needed, 4);
    let mut buffer = [7 as c_char; 5];
    // SAFETY: the buffer has the stated capacity.
    let fault = unsafe { out.text("abc".to_owned(), buffer.as_mut_ptr(), 3) }.unwrap_err();
    assert_eq!((fault.status, buffer), (DORMOUSE_ERR_LIMIT, [7; 5]));
    // SAFETY: as above.
    unsafe { out.text("abc".to_owned(), buffer.as_mut_ptr(), 4) }.unwrap();
    assert_eq!(buffer, [97, 98, 99, 0, 7]);
}

#[test]
fn offsets_must_ascend() {
    let read = |offsets: &[u64]| {
        // SAFETY: a live slice of that length.
        unsafe { In::offsets(offsets.as_ptr(), offsets.len() - 1, "offsets") }.map(<[u64]>::len)
    };
    assert_eq!(read(&[0, 2, 2, 5]).unwrap(), 4);
    let message = read(&[0, 4, 3]).unwrap_err().message;
    assert!(message.contains("offsets falls from 4 to 3 at 2"), "{message}");
    // SAFETY: NULL is allowed.
    let none = unsafe { In::offsets(std::ptr::null(), 0, "offsets") };
    assert!(none.unwrap().is_empty(), "no offsets for no sequences");
}
