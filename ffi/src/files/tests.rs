use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;

use super::*;

fn folder(test: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("dormouse-files-{}-{test}", std::process::id()));
    let _absent = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    write_file(path, |file| file.write_all(text.as_bytes()))
}

fn count(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Returns the error of `attempt` once it fails. A child that another test starts holds this process's reading ends
/// until it executes its program.
fn refusal<T, E>(attempt: impl Fn() -> Result<T, E>) -> E {
    const ATTEMPTS_MAX: u32 = 1000;
    for _ in 0..ATTEMPTS_MAX {
        match attempt() {
            Ok(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
            Err(error) => return error,
        }
    }
    panic!("{ATTEMPTS_MAX} attempts succeeded; expected a refusal");
}

#[test]
fn a_regular_file_is_replaced_whole_and_keeps_its_permissions() {
    let folder = folder("regular");
    let path = folder.join("dump");
    write(&path, "first, which is longer").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let mut reader = File::open(&path).unwrap();
    write(&path, "second").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut old = String::new();
    reader.read_to_string(&mut old).unwrap();
    assert_eq!(old, "first, which is longer", "a reader keeps the old file");
    write_file(&path, |_| Err(io::Error::other("half way"))).unwrap_err();
    assert_eq!((fs::read_to_string(&path).unwrap().as_str(), count(&folder)), ("second", 1));
}

/// Each of an earlier process, or of another container, with this pid.
#[test]
fn files_that_others_left_aside_take_no_names() {
    const LEFT: usize = 1024;
    let folder = folder("left");
    for number in 0..LEFT {
        fs::write(folder.join(format!(".dormouse-{}-{number}.tmp", std::process::id())), "")
            .unwrap();
    }
    write(&folder.join("dump"), "text").unwrap();
    assert_eq!(count(&folder), LEFT + 1);
    let names: std::collections::HashSet<String> = (0..LEFT).map(|_| aside_name()).collect();
    assert_eq!(names.len(), LEFT, "no name comes twice");
    let begin = format!(".dormouse-{}-{}-", host::name(), std::process::id());
    assert!(names.iter().all(|name| name.starts_with(&begin)), "{names:?}");
}

#[test]
fn links_stay_links_and_their_targets_are_replaced() {
    let folder = folder("links");
    fs::create_dir(folder.join("deep")).unwrap();
    let (target, link, chain) =
        (folder.join("deep/target"), folder.join("link"), folder.join("chain"));
    symlink("deep/target", &link).unwrap();
    symlink("link", &chain).unwrap();
    // Dangling at first: the target is created.
    for (path, text) in [(&link, "one"), (&chain, "two")] {
        write(path, text).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), text);
        assert!(fs::symlink_metadata(path).unwrap().is_symlink());
    }
    let looped = folder.join("loop");
    symlink("loop", &looped).unwrap();
    assert_eq!(write(&looped, "x").unwrap_err().raw_os_error(), Some(libc::ELOOP));
    assert_eq!(write(&folder, "x").unwrap_err().raw_os_error(), Some(libc::EISDIR));
    assert_eq!((count(&folder), count(&folder.join("deep"))), (4, 1));
}

#[test]
fn devices_fifos_and_sockets_stay_what_they_are() {
    let folder = folder("others");
    let at = |name: &str| folder.join(name);
    // Behind links: the folder of the devices is not touched if this fails.
    symlink("/dev/full", at("full")).unwrap();
    symlink("/dev/null", at("null")).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fifo(&at("fifo"));
    assert_eq!(write(&at("full"), "x").unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    write(&at("null"), "x").unwrap();
    assert!(write(&at("fifo"), "x").unwrap_err().to_string().contains("no process reads"));
    write(&at("socket"), "x").unwrap_err();
    for device in ["full", "null"] {
        assert!(fs::symlink_metadata(at(device)).unwrap().is_symlink());
        assert!(fs::metadata(at(device)).unwrap().file_type().is_char_device());
    }
    assert!(fs::metadata(at("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::metadata(at("socket")).unwrap().file_type().is_socket());
    assert_eq!(count(&folder), 4);
}

#[test]
fn a_fifo_is_written_to_its_reader_and_a_broken_one_is_an_error() {
    let folder = folder("fifo");
    let path = folder.join("fifo");
    fifo(&path);
    let open = || OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let mut reader = open();
    // More than a pipe holds: the writer waits for the reader.
    let text = "words\n".repeat(100_000);
    let seen = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&path, &text));
        let mut seen = Vec::new();
        while seen.len() < text.len() && !(writer.is_finished() && seen.is_empty()) {
            let mut piece = [0; 4096];
            match reader.read(&mut piece) {
                Ok(bytes) => seen.extend_from_slice(&piece[..bytes]),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        writer.join().unwrap().unwrap();
        seen
    });
    assert!(seen == text.as_bytes());
    drop(reader);
    let broken = refusal(|| write_file(&path, |_| Ok(())));
    assert!(broken.to_string().contains("no process reads"), "{broken}");
}

#[test]
fn a_pipe_without_a_reader_is_an_error_and_raises_no_signal() {
    let (reader, writer) = io::pipe().unwrap();
    // SAFETY: SIGPIPE has its default effect, which ends the process, for this test.
    let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    drop(reader);
    for _ in 0..2 {
        let error = refusal(|| write_without_signal(writer.as_raw_fd(), b"x"));
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
    }
    // SAFETY: as above.
    unsafe { libc::signal(libc::SIGPIPE, before) };
}

#[test]
fn an_open_file_behind_proc_is_appended_to() {
    let folder = folder("proc");
    let path = folder.join("log");
    let mut open = File::create(&path).unwrap();
    open.write_all(b"before,").unwrap();
    write(Path::new(&format!("/proc/self/fd/{}", open.as_raw_fd())), "after").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "before,after");
    assert_eq!(fs::metadata(&path).unwrap().len(), 12, "the same file");
    assert_eq!(count(&folder), 1);
}

#[test]
fn threads_that_write_one_path_leave_a_whole_file() {
    let folder = folder("threads");
    let path = folder.join("dump");
    let texts = [b'a', b'b', b'c', b'd'].map(|byte| vec![byte; 20_000]);
    std::thread::scope(|scope| {
        for text in &texts {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..50 {
                    write_file(path, |file| file.write_all(text)).unwrap();
                }
            });
        }
    });
    assert!(texts.contains(&fs::read(&path).unwrap()));
    assert_eq!(count(&folder), 1);
}

#[test]
fn only_short_regular_files_are_read() {
    let folder = folder("read");
    let at = |name: &str| folder.join(name);
    fs::write(at("short"), "12345").unwrap();
    fs::write(at("long"), "123456").unwrap();
    fs::write(at("bytes"), [0xff]).unwrap();
    symlink("short", at("link")).unwrap();
    fifo(&at("fifo"));
    let read = |path: &Path| read_file(path, 5).map_err(|error| error.to_string());
    assert_eq!(read(&at("short")).unwrap(), "12345");
    assert_eq!(read(&at("link")).unwrap(), "12345");
    assert!(read(&at("long")).unwrap_err().contains("at most 5 bytes"));
    assert!(read(&at("bytes")).unwrap_err().contains("UTF-8"));
    // Its length is 0 until it is read.
    assert!(read(Path::new("/proc/self/maps")).unwrap_err().contains("at most 5 bytes"));
    for path in [at("fifo"), PathBuf::from("/dev/zero"), folder.clone()] {
        assert!(read(&path).unwrap_err().contains("no regular file"), "{path:?}");
    }
}

#[test]
fn a_new_file_takes_the_first_free_name_and_replaces_none() {
    let folder = folder("new");
    let paths = || (0..).map(|number| folder.join(format!("dump-{number}")));
    let dump = |text: &str| dump_new(paths(), |file| file.write_all(text.as_bytes())).unwrap();
    // A link, even one that leads nowhere, is taken.
    symlink("nowhere", folder.join("dump-1")).unwrap();
    assert_eq!(dump("first"), folder.join("dump-0"));
    assert_eq!(dump("second"), folder.join("dump-2"));
    assert_eq!(fs::read_to_string(folder.join("dump-0")).unwrap(), "first");
    let refused = dump_new(std::iter::repeat(folder.join("dump-0")), |_| Ok(())).unwrap_err();
    assert!(refused.message.contains("dump-0: File exists"), "{}", refused.message);
    dump_new(paths(), |_| Err(io::Error::other("half way"))).unwrap_err();
    assert_eq!(count(&folder), 3, "nothing is left aside");
    // Where the file system cannot do it in one step.
    let aside = folder.join("aside");
    fs::write(&aside, "third").unwrap();
    assert!(take_and_rename(&aside, &folder.join("dump-0")).is_err());
    take_and_rename(&aside, &folder.join("dump-3")).unwrap();
    assert_eq!(
        (fs::read_to_string(folder.join("dump-3")).unwrap().as_str(), aside.exists()),
        ("third", false)
    );
}

#[test]
fn a_log_takes_the_first_free_name() {
    let folder = folder("first");
    let create = || create_first((0..).map(|number| folder.join(format!("log-{number}"))));
    assert_eq!(create().unwrap().1, folder.join("log-0"));
    assert_eq!(create().unwrap().1, folder.join("log-1"));
    let nowhere = create_first(std::iter::repeat(folder.join("absent/log"))).unwrap_err();
    assert!(nowhere.contains("absent/log: No such file"), "{nowhere}");
}
