//! Files that a program names: dumps, the log and the configuration.
//!
//! - A regular file, or a new one, is written aside and renamed, so a reader sees the old file or the new one.
//!   Symbolic links are followed; what is replaced is their target.
//! - Anything else keeps its place: a device, a FIFO, and an open file behind `/proc` such as `/dev/stdout`.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use crate::fault::Fault;
use crate::{host, status};

/// Limit of the symbolic links that are followed; the kernel's own.
const LINKS_MAX: u32 = 40;
/// Limit of the names that are tried for the file aside.
const NAME_ATTEMPTS_MAX: u32 = 16;
/// Limit of the names that are tried for a new file: more than one process of a name leaves behind.
const NEW_NAMES_MAX: usize = 4096;

/// Writes what `fill` writes to the file at `path`.
pub(crate) fn dump(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), Fault> {
    if path.file_name().is_none() {
        return Err(Fault::argument(format!("path is {path:?}; accepted: the path of a file")));
    }
    write_file(path, fill).map_err(|error| {
        let message = format!("could not write {}: {error}", path.display());
        Fault::new(status::DORMOUSE_ERR_IO, message)
    })
}

/// Writes what `fill` writes to a new file with the first of `paths` that is free, and returns it. All are in one folder.
pub(crate) fn dump_new(
    mut paths: impl Iterator<Item = PathBuf>,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<PathBuf, Fault> {
    let mut path = paths.next().unwrap_or_default();
    let folder = folder_of(&path).to_owned();
    let written = aside(
        &folder,
        |file| fill(file),
        |aside| {
            for _ in 0..NEW_NAMES_MAX {
                match rename_new(aside, &path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    moved => return moved,
                }
                path = paths.next().unwrap_or_default();
            }
            Err(io::Error::from_raw_os_error(libc::EEXIST))
        },
    );
    written.map(|()| path.clone()).map_err(|error| {
        let message = format!("could not write {}: {error}", path.display());
        Fault::new(status::DORMOUSE_ERR_IO, message)
    })
}

fn write_file(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match replaceable(path)? {
        Some(target) => replace(&target, fill),
        None => {
            let mut file = BufWriter::new(WithoutSignal(open_in_place(path)?));
            fill(&mut file).and_then(|()| file.flush())
        }
    }
}

/// Opens `path` for appending, and creates it if it is absent. A FIFO without a reader is an error: an open
/// that waits would stop the program.
pub(crate) fn open_in_place(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o644);
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => io::Error::other("no process reads from it"),
        _ => error,
    })?;
    // SAFETY: the file is open, and the flags are those of its opening. A refusal leaves writes that do not wait.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) };
    Ok(file)
}

/// Writes `bytes` to a descriptor in one call. Where no process reads from a pipe any more, or the file would exceed
/// the process's limit, this is an error and no SIGPIPE or SIGXFSZ, which would end a program that did not ask for the
/// write.
pub(crate) fn write_without_signal(descriptor: i32, bytes: &[u8]) -> io::Result<usize> {
    let (mut raised, mut pending, mut before) =
        (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: live locals, each written before it is read. The mask of this thread is restored below. Both signals are
    // sent to the writing thread; one that was pending before is left.
    unsafe {
        libc::sigemptyset(raised.as_mut_ptr());
        libc::sigaddset(raised.as_mut_ptr(), libc::SIGPIPE);
        libc::sigaddset(raised.as_mut_ptr(), libc::SIGXFSZ);
        libc::sigemptyset(pending.as_mut_ptr());
        libc::sigpending(pending.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, raised.as_ptr(), before.as_mut_ptr());
        let written = libc::write(descriptor, bytes.as_ptr().cast(), bytes.len());
        let result = usize::try_from(written).map_err(|_| io::Error::last_os_error());
        let signal = match result.as_ref().map_err(io::Error::raw_os_error) {
            Err(Some(libc::EPIPE)) => Some(libc::SIGPIPE),
            Err(Some(libc::EFBIG)) => Some(libc::SIGXFSZ),
            _ => None,
        };
        if let Some(signal) = signal
            && libc::sigismember(pending.as_ptr(), signal) != 1
        {
            libc::sigemptyset(raised.as_mut_ptr());
            libc::sigaddset(raised.as_mut_ptr(), signal);
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(raised.as_ptr(), null_mut(), &raw const at_once);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
        result
    }
}

/// A file whose writes raise no SIGPIPE and no SIGXFSZ.
struct WithoutSignal(File);

impl Write for WithoutSignal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_without_signal(self.0.as_raw_fd(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Follows symbolic links. Returns the path of a regular or absent file; `None` for anything else.
fn replaceable(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..=LINKS_MAX {
        let kind = match fs::symlink_metadata(&path) {
            Ok(found) => found.file_type(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(path)),
            Err(error) => return Err(error),
        };
        if kind.is_dir() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        if !kind.is_symlink() {
            return Ok(kind.is_file().then_some(path));
        }
        let folder = folder_of(&path).canonicalize()?;
        if folder.starts_with("/proc") {
            // An open file: a path is only what it was called once.
            return Ok(None);
        }
        path = folder.join(fs::read_link(&path)?);
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Writes a file aside and renames it to `target`. The permissions of an existing file are kept.
fn replace(target: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let fill = |file: &mut BufWriter<WithoutSignal>| {
        let permissions = fs::metadata(target).ok().map(|existing| existing.permissions());
        permissions.map_or(Ok(()), |kept| file.get_ref().0.set_permissions(kept))?;
        fill(file)
    };
    aside(folder_of(target), fill, |aside| fs::rename(aside, target))
}

/// Writes a file aside in `folder`, and has `rename` give it its name. If that fails, no file is left.
fn aside(
    folder: &Path,
    fill: impl FnOnce(&mut BufWriter<WithoutSignal>) -> io::Result<()>,
    rename: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let (file, path) = create_aside(folder)?;
    let mut file = BufWriter::new(WithoutSignal(file));
    // A file system of another machine, or with a quota, may refuse the bytes only now: before they replace others.
    let filled =
        fill(&mut file).and_then(|()| file.flush()).and_then(|()| file.get_ref().0.sync_all());
    filled.and_then(|()| rename(&path)).inspect_err(|_| {
        let _gone_already = fs::remove_file(&path);
    })
}

/// Renames `from` to `to`, which must be free: else the error is `AlreadyExists`.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let [from_c, to_c] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (from_c, to_c) = (from_c?, to_c?);
    // By number: the function needs a newer libc than others here.
    // SAFETY: two NUL-terminated paths.
    let renamed = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            from_c.as_ptr(),
            libc::AT_FDCWD,
            to_c.as_ptr(),
            libc::RENAME_NOREPLACE,
        )
    };
    if renamed == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // A file system without this, such as NFS.
        error if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
            take_and_rename(from, to)
        }
        error => Err(error),
    }
}

/// Renames `from` to `to`, which must be free, in two steps: takes the name, and replaces the empty file.
fn take_and_rename(from: &Path, to: &Path) -> io::Result<()> {
    File::create_new(to).and_then(|_taken| fs::rename(from, to))
}

/// Creates a file of its own in `folder`. It follows no symbolic link that another user planted.
fn create_aside(folder: &Path) -> io::Result<(File, PathBuf)> {
    let mut last = io::Error::from_raw_os_error(libc::EEXIST);
    for _ in 0..NAME_ATTEMPTS_MAX {
        let path = folder.join(aside_name());
        match File::create_new(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Returns a name of a file aside. Containers that share the folder have equal pids, and one that was killed leaves its
/// file: host and pid tell whose it was, the number makes it new.
fn aside_name() -> String {
    // Seeded by the system at random, and another one for each call.
    let number = RandomState::new().build_hasher().finish();
    let host = host::name().replace('/', "_");
    format!(".dormouse-{host}-{}-{number:016x}.tmp", std::process::id())
}

/// Creates a file with the first of `paths` that is free, readable by its owner only.
pub(crate) fn create_first(
    paths: impl Iterator<Item = PathBuf>,
) -> Result<(File, PathBuf), String> {
    let mut refusal = "no name for a file".to_owned();
    for path in paths.take(NEW_NAMES_MAX) {
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) => {
                refusal = format!("could not write {}: {error}", path.display());
                if error.kind() != io::ErrorKind::AlreadyExists {
                    break;
                }
            }
        }
    }
    Err(refusal)
}

/// Reads the regular file at `path`, at most `bytes_max` bytes. A device or FIFO is refused without opening it: it
/// could wait, or never end.
pub(crate) fn read_file(path: &Path, bytes_max: u64) -> io::Result<String> {
    let check = |found: fs::Metadata| match found.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("no regular file; accepted: a regular file")),
    };
    check(fs::metadata(path)?)?;
    // A FIFO that takes the file's place meanwhile does not block.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    check(file.metadata()?)?;
    let mut bytes = Vec::new();
    // Read, not asked for: the length of a file of the kernel is 0.
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::other(format!("longer; accepted: at most {bytes_max} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other("other bytes; accepted: UTF-8"))
}

#[cfg(test)]
mod tests;
