#![allow(unsafe_code, clippy::unwrap_used, reason = "forks; a test fails by panicking")]

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::layout::{FIGURE_WORDS, HEADER_WORDS, NUMBER_WORDS, first_page};
use super::*;

const SEQUENCE_AT: u64 = 64;

/// An empty folder for one test.
pub(super) fn folder(test: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("dormouse-live-{}-{test}", std::process::id()));
    let _absent = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Figures whose numbers are `first`, `first + 1` ...
pub(super) fn numbered(first: u64) -> Figures {
    let number = |at: usize| if at < NUMBER_WORDS { first + at as u64 } else { 0 };
    Figures::from_words(std::array::from_fn(number))
}

/// This process, with a longer name than a page holds.
pub(super) fn this() -> Process {
    Process::current("a name of 15 byé", 3)
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn process() -> Process {
    Process { pid: 7, name: "python".to_owned(), rank: 3 }
}

#[test]
fn the_layout_is_fixed() {
    let bytes = first_page(&process(), 9, &numbered(100));
    assert_eq!(bytes.len(), 4096);
    assert_eq!(&bytes[..8], b"dormouse");
    assert_eq!([8, 16, 24, 32].map(|at| word_at(&bytes, at)), [3 | 4096 << 32, 7, 9, 3]);
    assert_eq!(&bytes[40..56], b"python\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(word_at(&bytes, 56), 0);
    assert_eq!(word_at(&bytes, 64), 2, "update 0 is complete");
    for at in 0..23 {
        assert_eq!(word_at(&bytes, 72 + 8 * at), 100 + at as u64);
    }
    assert!(bytes[256..].iter().all(|byte| *byte == 0));
    assert_eq!((HEADER_WORDS, FIGURE_WORDS), (8, 369));
}

#[test]
fn every_figure_has_its_word() {
    let figures = numbered(0);
    assert_eq!(figures.words()[..23], std::array::from_fn::<u64, 23, _>(|at| at as u64));
    assert_eq!(figures.updated_ns, 0);
    assert_eq!(figures.tier_used_bytes, [1, 2, 3]);
    assert_eq!(figures.tier_peak_bytes, [4, 5, 6]);
    assert_eq!(figures.tier_budget_bytes, [7, 8, 9]);
    assert_eq!(figures.link_copied_bytes, [10, 11, 12, 13]);
    assert_eq!(figures.link_bytes_per_s, [14, 15, 16, 17]);
    let rest = [figures.asleep_bytes, figures.cached_bytes, figures.stall_ns];
    assert_eq!(rest, [18, 19, 20]);
    assert_eq!((figures.alloc_failures, figures.tag_count), (21, 22));
    assert_eq!((figures.tags, figures.last_dump), (Vec::new(), None));
    assert_eq!(figures.settings, [SettingFigure::default(); 6]);
}

/// They are behind all that earlier releases read, so those read the page as before.
#[test]
fn settings_come_last() {
    let setting =
        |at: usize| SettingFigure { value: 10 + at as u64, is_automatic: at == 1 || at == 5 };
    let figures = Figures { settings: std::array::from_fn(setting), ..numbered(100) };
    let bytes = first_page(&process(), 9, &figures);
    for at in 0..6 {
        assert_eq!(word_at(&bytes, 2968 + 8 * at), 10 + at as u64);
    }
    assert_eq!(word_at(&bytes, 3016), 0b10_0010);
    assert!(bytes[256..2968].iter().chain(&bytes[3024..]).all(|byte| *byte == 0));
    assert_eq!(Figures::from_words(figures.words()), figures);
}

fn tag(name: &str, resident_bytes: u64, asleep_bytes: u64) -> TagFigures {
    TagFigures { name: name.to_owned(), resident_bytes, asleep_bytes }
}

#[test]
fn tags_and_the_last_dump_have_their_places() {
    let (tags, path) = (vec![tag("kv", 5, 6), tag("weights", 7, 8)], "/d/x.html".to_owned());
    let last_dump = Some(DumpFigures { written_unix_ns: 9, reason: "oom".to_owned(), path });
    let figures = Figures { tags, last_dump, ..numbered(100) };
    let bytes = first_page(&process(), 9, &figures);
    assert_eq!([256, 264, 336, 344].map(|at| word_at(&bytes, at)), [5, 6, 7, 8]);
    assert!(bytes[272..].starts_with(b"kv\0") && bytes[352..].starts_with(b"weights\0"));
    assert_eq!(word_at(&bytes, 896), 9);
    assert!(bytes[904..].starts_with(b"oom\0") && bytes[920..].starts_with(b"/d/x.html\0"));
    assert_eq!(Figures::from_words(figures.words()), figures);
}

#[test]
fn what_exceeds_its_place_is_cut_at_a_character_and_paths_keep_their_end() {
    let tags: Vec<_> = (1..=9).map(|at| tag(&"é".repeat(40), at, 0)).collect();
    let (reason, path) = ("r".repeat(40), "é".repeat(2000) + "x");
    let last_dump = Some(DumpFigures { written_unix_ns: 1, reason, path });
    let kept = Figures::from_words(Figures { tags, last_dump, ..numbered(0) }.words());
    assert_eq!(kept.tags.len(), PAGE_TAGS_MAX);
    assert!(kept.tags.iter().all(|it| it.name == "é".repeat(TAG_NAME_BYTES_MAX / 2)));
    let dump = kept.last_dump.unwrap();
    assert_eq!(dump.reason, "r".repeat(DUMP_REASON_BYTES_MAX));
    assert_eq!(dump.path, "é".repeat(DUMP_PATH_BYTES_MAX / 2 - 1) + "x");
}

#[test]
fn a_reader_sees_what_was_published_and_the_file_lives_as_long_as_its_writer() {
    let path = folder("published").join("page");
    let before_ns = crate::ClockAnchor::now().realtime_ns;
    let mut page = LivePage::create(&path, &this(), &numbered(5)).unwrap();
    let live = read(&path).unwrap();
    // The last character would be cut in two.
    let process = Process { name: "a name of 15 by".to_owned(), ..this() };
    assert_eq!((&live.process, live.updates, live.figures), (&process, 0, numbered(5)));
    assert!(live.is_running);
    assert!((before_ns..before_ns + 60_000_000_000).contains(&live.started_unix_ns));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(page.publish(&numbered(50)));
    let live = read(&path).unwrap();
    assert_eq!((live.updates, live.figures), (1, numbered(50)));
    drop(page);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "no file remains");
}

#[test]
fn a_page_is_replaced_by_a_newer_one_which_its_first_writer_leaves() {
    let path = folder("replaced").join("page");
    fs::write(&path, "an old file").unwrap();
    let mut first = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    let _second = LivePage::create(&path, &this(), &numbered(2)).unwrap();
    assert!(first.publish(&numbered(3)));
    drop(first);
    assert_eq!(read(&path).unwrap().figures, numbered(2));
}

#[test]
fn only_regular_files_are_replaced_or_read() {
    let dir = folder("refused");
    let target = dir.join("target");
    fs::write(&target, "kept").unwrap();
    let at = |name: &str| dir.join(name);
    fs::create_dir(at("dir")).unwrap();
    symlink(&target, at("link")).unwrap();
    symlink(dir.join("absent"), at("dangling")).unwrap();
    assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
    let _socket = UnixListener::bind(at("socket")).unwrap();
    for (path, kind) in [
        (at("dir"), "directory"),
        (at("link"), "symbolic link"),
        (at("dangling"), "symbolic link"),
        (at("fifo"), "FIFO"),
        (at("socket"), "socket"),
        (PathBuf::from("/dev/null"), "device"),
        (PathBuf::from("/"), "directory"),
    ] {
        let refused = LiveError::NotAFile(path.clone(), kind);
        assert_eq!(LivePage::create(&path, &this(), &numbered(0)).unwrap_err(), refused);
        assert_eq!(read(&path).unwrap_err(), refused);
    }
    let missing = LivePage::create(&dir.join("no/page"), &this(), &numbered(0)).unwrap_err();
    assert!(matches!(missing, LiveError::Io("create", ..)), "{missing}");
    assert!(matches!(read(&at("absent")), Err(LiveError::Io("read", ..))));
    assert_eq!(fs::read(&target).unwrap(), b"kept");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 6, "no file remains");
}

#[test]
fn a_symbolic_link_in_the_place_of_the_temporary_file_is_not_followed() {
    let dir = folder("planted");
    let (target, path) = (dir.join("target"), dir.join("page"));
    fs::write(&target, "kept").unwrap();
    symlink(&target, dir.join(format!("page.{}.tmp", std::process::id()))).unwrap();
    let _page = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"kept");
    assert_eq!(read(&path).unwrap().figures, numbered(1));
}

#[test]
fn other_files_are_typed_errors() {
    let path = folder("others").join("page");
    let of = |words: &[(u64, u64)]| {
        fs::write(&path, first_page(&process(), 9, &numbered(0))).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        for (at, word) in words {
            file.write_all_at(&word.to_ne_bytes(), *at).unwrap();
        }
        read(&path).map(|live| live.updates)
    };
    assert_eq!(of(&[]), Ok(0));
    assert_eq!(of(&[(0, 3)]), Err(LiveError::Magic(3)));
    // The page of the release before this one, and of the next.
    for version in [2, 4] {
        let refused = of(&[(8, version | 4096 << 32)]).unwrap_err();
        assert_eq!(refused, LiveError::Version(version as u32));
        let text =
            format!("layout version {version}, that of another release of dormouse; accepted: 3");
        assert!(refused.to_string().ends_with(&text), "{refused}");
    }
    assert_eq!(of(&[(8, 3 | 8192 << 32)]), Err(LiveError::Size(8192)));
    // The writer ended within update 4, then after it.
    assert_eq!(of(&[(SEQUENCE_AT, 9)]), Err(LiveError::Torn(50)));
    assert_eq!(of(&[(SEQUENCE_AT, 10)]), Ok(4));
    for bytes in [0, 4095, 4097] {
        fs::write(&path, vec![0; bytes]).unwrap();
        assert_eq!(read(&path), Err(LiveError::Size(bytes as u64)));
    }
}

#[test]
fn a_truncated_file_ends_the_updates() {
    let path = folder("truncated").join("page");
    let mut page = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    assert!(!page.publish(&numbered(2)));
}

/// A load behind the end of a mapped file would end the reader.
#[test]
fn a_page_that_is_cut_short_while_it_is_read_is_an_error() {
    let path = folder("cut").join("page");
    let _page = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    let reader = file::open(&path).unwrap();
    assert!(reader.update().unwrap().is_some());
    let file = File::options().write(true).open(&path).unwrap();
    for bytes in [72, 0] {
        file.set_len(bytes).unwrap();
        assert_eq!(reader.update(), Err(LiveError::Size(bytes)));
    }
}

#[test]
fn a_file_that_took_the_number_of_the_page_is_not_closed() {
    let folder = folder("number");
    let path = folder.join("page");
    let mut page = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    let names_page =
        |fd: &i32| fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|to| to == path);
    let fd = (3..1024).find(names_page).unwrap();
    let other = File::create_new(folder.join("other")).unwrap();
    other.set_len(4096).unwrap();
    // SAFETY: the program closes a descriptor that it does not own, which is the point.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
    assert!(!page.publish(&numbered(2)), "the length of the file is not known");
    drop(page);
    // SAFETY: the program's own descriptor, still open.
    assert_eq!(unsafe { libc::close(fd) }, 0);
    assert!(!path.exists(), "the page is removed");
}

#[test]
fn readers_never_see_parts_of_two_updates() {
    let path = folder("race").join("page");
    let updates: u64 = 200_000;
    // Every word is the number of the update, but for texts.
    let whole = |value: u64| {
        let text = format!("{value:016}");
        let dump =
            DumpFigures { written_unix_ns: value, reason: text.clone(), path: text.repeat(128) };
        Figures {
            tags: vec![tag(&text.repeat(4), value, value); PAGE_TAGS_MAX],
            last_dump: (value > 0).then_some(dump),
            ..numbered(value)
        }
    };
    let mut page = LivePage::create(&path, &this(), &whole(0)).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let page = file::open(&path).unwrap();
            let (mut last, mut seen) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                if let Some((updates, words)) = page.update().unwrap() {
                    assert_eq!(words, whole(updates).words());
                    assert!(updates >= last);
                    (last, seen) = (updates, seen + 1);
                }
            }
            seen
        });
        for value in 1..=updates {
            assert!(page.publish(&whole(value)));
        }
        std::thread::sleep(Duration::from_millis(5));
        is_over.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    assert_eq!(read(&path).unwrap().updates, updates);
}

#[test]
fn a_forked_child_writes_nothing_and_removes_nothing() {
    let path = folder("forked").join("page");
    let mut page = LivePage::create(&path, &this(), &numbered(1)).unwrap();
    // SAFETY: the child makes system calls, stores to the mapping if the check fails, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_written = page.publish(&numbered(2));
        drop(page);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(is_written)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child; `status` is a live local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was told that nothing was written");
    let live = read(&path).unwrap();
    assert_eq!((live.updates, live.figures), (0, numbered(1)));
}

/// A write beyond the limit of file sizes fails like one to a full disk.
#[test]
fn a_file_without_room_is_an_error_and_leaves_nothing() {
    const TEST: &str = "live::tests::a_file_without_room_is_an_error_and_leaves_nothing";
    const DIR: &str = "DORMOUSE_TEST_LIVE_DIR";
    if let Some(dir) = std::env::var_os(DIR) {
        let path = Path::new(&dir).join("page");
        let error = LivePage::create(&path, &this(), &numbered(0)).unwrap_err();
        assert!(matches!(error, LiveError::Io("create", ..)), "{error}");
        assert!(error.to_string().contains("too large"), "{error}");
        return;
    }
    let dir = folder("room");
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" --exact \"$1\""]);
    let output =
        limited.arg(std::env::current_exe().unwrap()).arg(TEST).env(DIR, &dir).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}
