use super::*;
use crate::status::*;

fn options() -> c::dormouse_options_t {
    // SAFETY: zeros are a valid value of a shared struct.
    let mut it = unsafe { std::mem::zeroed::<c::dormouse_options_t>() };
    it.size = size_of::<c::dormouse_options_t>() as u32;
    it.version = 1;
    it
}

fn last() -> String {
    // SAFETY: this thread's own NUL-terminated buffer.
    unsafe { CStr::from_ptr(fault::last_sentence()) }.to_str().unwrap().to_owned()
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
fn a_decline_keeps_its_reason() {
    assert_eq!(enter(|| Ok(Outcome::Declined("disk full".to_owned()))), DORMOUSE_DECLINED);
    assert_eq!(last(), "disk full");
    assert_eq!(enter(|| Ok(Outcome::Partial("half of it".to_owned()))), DORMOUSE_PARTIAL);
    assert_eq!(last(), "half of it");
    assert_eq!(enter(|| Ok(Outcome::End("no more".to_owned()))), DORMOUSE_END);
    assert_eq!(last(), "no more");
}

#[test]
fn versions_and_sizes_are_checked() {
    let read = |it: &c::dormouse_options_t| {
        // SAFETY: a live local with an honest size, or one the check turns away before reading.
        unsafe { In::structure(&raw const *it, "options") }.map_err(|f| (f.status, f.sentence))
    };
    assert!(read(&options()).is_ok());
    let mut it = options();
    it.version = 7;
    let (status, sentence) = read(&it).unwrap_err();
    assert_eq!(status, DORMOUSE_ERR_VERSION);
    assert!(sentence.contains("version 7; accepted: 1"), "{sentence}");
    // Sizes that are none are turned away before anything behind the struct is read.
    for size in [0, 12, 71, 4097, u32::MAX] {
        let mut it = options();
        it.size = size;
        let (status, sentence) = read(&it).unwrap_err();
        assert_eq!(status, DORMOUSE_ERR_VERSION);
        let accepted = format!("size {size}; accepted: 72 to 4096");
        assert!(sentence.contains(&accepted), "{sentence}");
    }
}

#[test]
fn a_longer_struct_is_accepted_only_with_a_zero_tail() {
    #[repr(C)]
    struct Newer {
        known: c::dormouse_options_t,
        later: u64,
    }
    let mut it = Newer { known: options(), later: 0 };
    it.known.size = size_of::<Newer>() as u32;
    // SAFETY: `Newer` is readable for the size it says.
    let ok = unsafe { In::structure((&raw const it).cast::<c::dormouse_options_t>(), "options") };
    assert!(ok.is_ok());
    it.later = 1;
    // SAFETY: as above.
    let no = unsafe { In::structure((&raw const it).cast::<c::dormouse_options_t>(), "options") };
    assert_eq!(no.unwrap_err().status, DORMOUSE_ERR_VERSION);
}

#[test]
fn an_older_caller_gets_as_much_as_it_knows_and_not_a_byte_more() {
    // SAFETY: zeros are a valid value of a shared struct.
    let mut it = unsafe { std::mem::zeroed::<c::dormouse_op_t>() };
    it.size = 24;
    it.version = 1;
    it.token_begin = 99;
    // SAFETY: a live local with more room than it says.
    let out = unsafe { Out::sized(&raw mut it, "op") }.unwrap();
    // SAFETY: zeros are a valid value of a shared struct.
    let mut value = unsafe { std::mem::zeroed::<c::dormouse_op_t>() };
    (value.id, value.kind, value.token_begin) = (5, 2, 7);
    out.fill(value);
    assert_eq!((it.size, it.version, it.id, it.kind), (24, 1, 5, 2));
    assert_eq!(it.token_begin, 99, "past the caller's size");
}

#[test]
fn null_and_misaligned_pointers_are_named() {
    // SAFETY: NULL is what is tested.
    let fault = unsafe { Out::<u64>::new(std::ptr::null_mut(), "bytes_out") }.unwrap_err();
    assert_eq!(fault.status, DORMOUSE_ERR_NULL);
    assert!(fault.sentence.contains("bytes_out"));
    let odd = std::ptr::without_provenance_mut::<u64>(0x1001);
    // SAFETY: never written: the check turns it away.
    let fault = unsafe { Out::<u64>::new(odd, "bytes_out") }.unwrap_err();
    assert_eq!(fault.status, DORMOUSE_ERR_ARGUMENT);
}

#[test]
fn text_follows_the_two_call_rule() {
    let mut needed = 0_u64;
    // SAFETY: a live local.
    let out = unsafe { Out::new(&raw mut needed, "needed_out") }.unwrap();
    // SAFETY: NULL asks for the length.
    unsafe { out.text("abc", std::ptr::null_mut(), 0) }.unwrap();
    assert_eq!(needed, 4);
    let mut buffer = [7 as c_char; 5];
    // SAFETY: the buffer has the room it says.
    let fault = unsafe { out.text("abc", buffer.as_mut_ptr(), 3) }.unwrap_err();
    assert_eq!((fault.status, buffer), (DORMOUSE_ERR_LIMIT, [7; 5]));
    // SAFETY: as above.
    unsafe { out.text("abc", buffer.as_mut_ptr(), 4) }.unwrap();
    assert_eq!(buffer, [97, 98, 99, 0, 7]);
}
