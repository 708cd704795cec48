//! The parameters of `libdormouse.so`, read through its C interface.
#![expect(unsafe_code, reason = "calls a C library")]

use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use libloading::Library;
use serde::Serialize;

/// File name of the library.
pub(crate) const NAME: &str = "libdormouse.so";
/// Variable that names the library, as for the Python package.
const VARIABLE: &str = "DORMOUSE_LIB";

/// Maximum number of parameters.
const PARAMS_MAX: u32 = 1024;
/// `DORMOUSE_STRUCT_VERSION`.
const STRUCT_VERSION: u32 = 1;
/// `DORMOUSE_TEXT_BYTES`.
const TEXT_BYTES: usize = 512;
/// `DORMOUSE_END`.
const END: i32 = 4;
/// `DORMOUSE_FORMAT_CONFIG`.
const FORMAT_CONFIG: i32 = 3;

/// Names of `DORMOUSE_FROM_*`, by number.
const SOURCES: [&str; 5] = ["built in", "file", "environment", "options", AUTOMATIC];
/// The source of a value that the library chooses.
pub(crate) const AUTOMATIC: &str = "automatic";

/// `dormouse_param_t`.
#[repr(C)]
struct RawParam {
    size: u32,
    version: u32,
    name: *const c_char,
    kind: *const c_char,
    built_in: *const c_char,
    accepts: *const c_char,
    help: *const c_char,
    provenance: i32,
    reserved: u32,
    value: [c_char; TEXT_BYTES],
    reason: [c_char; TEXT_BYTES],
}

/// A parameter with its value for a process started in this shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// In the syntax of a configuration file; empty if not set.
    pub(crate) value: String,
    pub(crate) source: String,
    /// Why an automatic value is what it is; empty for others.
    pub(crate) reason: String,
    pub(crate) kind: String,
    pub(crate) built_in: String,
    pub(crate) accepts: String,
    pub(crate) help: String,
}

/// Reason that the library could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// It is at none of the places.
    #[error("{NAME} is not at {places}; accepted: --lib FILE, or {VARIABLE}")]
    Absent {
        /// The places.
        places: String,
    },
    /// It cannot be loaded, or is another library.
    #[error("{reason}; accepted: the {NAME} of this release")]
    Load {
        /// The reason of the loader, with the file.
        reason: String,
    },
    /// It refuses the configuration.
    #[error("{reason}")]
    Refused {
        /// Its message, which names the variable, the value and what is accepted.
        reason: String,
    },
    /// Its text could not be read.
    #[error("the configuration could not be read from the library: {0}")]
    Read(#[from] io::Error),
}

/// Returns the path of the library: `named`, `DORMOUSE_LIB`, or one near this program.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf, LibraryError> {
    let variable = std::env::var_os(VARIABLE).filter(|it| !it.is_empty()).map(PathBuf::from);
    if let Some(path) = named.map(Path::to_owned).or(variable) {
        return Ok(path);
    }
    let places = std::env::current_exe().map(|program| near(&program)).unwrap_or_default();
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        LibraryError::Absent { places: places.join(" or ") }
    })
}

/// Lists the places of the library of an installation: beside the program (a build), in `lib` (make install),
/// and in the Python package (a wheel).
fn near(program: &Path) -> Vec<PathBuf> {
    let Some(bin) = program.parent() else { return Vec::new() };
    let lib = bin.with_file_name("lib");
    let mut places = vec![bin.join(NAME), lib.join(NAME)];
    let entries = std::fs::read_dir(&lib).into_iter().flatten().flatten();
    let mut pythons: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python"))
        .map(|entry| entry.path().join("site-packages/dormouse").join(NAME))
        .collect();
    pythons.sort();
    places.extend(pythons);
    places
}

/// The library, loaded.
struct Loaded(Library);

impl Loaded {
    fn open(file: &Path) -> Result<Self, LibraryError> {
        // SAFETY: the initialisers of libdormouse.so only set static data; the user names the file.
        unsafe { Library::new(file) }.map(Self).map_err(load_error)
    }

    /// Returns why the call before this one failed.
    fn refusal(&self) -> LibraryError {
        type Message = unsafe extern "C" fn() -> *const c_char;
        // SAFETY: the header of this release declares it so.
        match unsafe { self.0.get::<Message>(b"dormouse_get_last_error\0") } {
            // SAFETY: returns text that is valid until the thread's next call.
            Ok(message) => LibraryError::Refused { reason: unsafe { text(message()) } },
            Err(error) => load_error(error),
        }
    }
}

fn load_error(error: libloading::Error) -> LibraryError {
    let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    LibraryError::Load { reason }
}

/// Reads all parameters of the library at `file`, as a process started with this environment has them.
pub(crate) fn params(file: &Path) -> Result<Vec<Param>, LibraryError> {
    type Get = unsafe extern "C" fn(u32, *mut RawParam) -> i32;
    let library = Loaded::open(file)?;
    // SAFETY: the header of this release declares it so, and its size and version are checked by the callee.
    let get = unsafe { library.0.get::<Get>(b"dormouse_param_get\0") }.map_err(load_error)?;
    let mut params = Vec::new();
    for index in 0..PARAMS_MAX {
        // SAFETY: all-zero words are null pointers, numbers and empty text.
        let mut raw: RawParam = unsafe { std::mem::zeroed() };
        raw.size = size_of::<RawParam>() as u32;
        raw.version = STRUCT_VERSION;
        // SAFETY: `raw` is writable for the size that it states.
        match unsafe { get(index, &raw mut raw) } {
            0 => {
                // SAFETY: the callee filled it, and the library is still loaded.
                params.push(unsafe { raw.read() });
            }
            END => break,
            _ => return Err(library.refusal()),
        }
    }
    Ok(params)
}

/// Returns the configuration of a process started with this environment as the library at `file` writes it for
/// `DORMOUSE_CONFIG`: values whole and quoted, unlike those of [`params`].
pub(crate) fn configuration(file: &Path) -> Result<String, LibraryError> {
    type Dump = unsafe extern "C" fn(*mut c_void, i32, *const c_char) -> i32;
    let library = Loaded::open(file)?;
    // SAFETY: the header of this release declares it so.
    let dump = unsafe { library.0.get::<Dump>(b"dormouse_runtime_dump\0") }.map_err(load_error)?;
    // The library writes to a path. A pipe has one, needs no folder and leaves nothing behind.
    let (mut reader, writer) = io::pipe()?;
    let path =
        CString::new(format!("/proc/self/fd/{}", writer.as_raw_fd())).map_err(io::Error::from)?;
    std::thread::scope(|scope| {
        let text = scope.spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).map(|_| text)
        });
        // SAFETY: this format needs no runtime, and the path is NUL-terminated.
        let status = unsafe { dump(null_mut(), FORMAT_CONFIG, path.as_ptr()) };
        // The reader sees the end.
        drop(writer);
        let text = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        if status == 0 { Ok(text) } else { Err(library.refusal()) }
    })
}

impl Param {
    /// Returns the source, with the reason of an automatic value.
    pub(crate) fn origin(&self) -> String {
        match self.reason.as_str() {
            "" => self.source.clone(),
            reason => format!("{}: {reason}", self.source),
        }
    }
}

impl RawParam {
    /// # Safety
    /// The pointers are NULL or text of a loaded library.
    unsafe fn read(&self) -> Param {
        // SAFETY: the caller's promise.
        let [name, kind, built_in, accepts, help] =
            [self.name, self.kind, self.built_in, self.accepts, self.help]
                .map(|pointer| unsafe { text(pointer) });
        let [value, reason] = [&self.value, &self.reason].map(|field| {
            let bytes: Vec<u8> = field.iter().map(|byte| *byte as u8).collect();
            let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
            text.to_string_lossy().into_owned()
        });
        let source = usize::try_from(self.provenance).ok().and_then(|at| SOURCES.get(at));
        Param {
            name,
            value,
            reason,
            source: (*source.unwrap_or(&"unknown")).to_owned(),
            kind,
            built_in,
            accepts,
            help,
        }
    }
}

/// # Safety
/// `pointer` is NULL or NUL-terminated text.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is declared here a second time is what the header says.
    #[test]
    fn the_declarations_are_those_of_the_header() {
        let header = include_str!("../../ffi/include/dormouse.h");
        let has = |line: &str| assert!(header.contains(line), "{line}");
        has(&format!("#define DORMOUSE_STRUCT_VERSION {STRUCT_VERSION}\n"));
        has(&format!("#define DORMOUSE_TEXT_BYTES {TEXT_BYTES}\n"));
        has(&format!("#define DORMOUSE_END {END}\n"));
        has(&format!("#define DORMOUSE_FORMAT_CONFIG {FORMAT_CONFIG}\n"));
        for (number, source) in SOURCES.iter().enumerate() {
            let name = source.to_uppercase().replace(' ', "_");
            has(&format!("#define DORMOUSE_FROM_{name} {number}\n"));
        }
        has(
            "dormouse_status_t dormouse_param_get(uint32_t index, struct dormouse_param_t *param_out);",
        );
        has("const char *dormouse_get_last_error(void);");
        let (_, body) = header.split_once("typedef struct dormouse_param_t {\n").unwrap();
        let (body, _) = body.split_once('}').unwrap();
        let fields = body.lines().map(str::trim).filter(|line| !line.starts_with("///"));
        let wanted = "uint32_t size; uint32_t version; const char *name; const char *kind; \
                      const char *built_in; const char *accepts; const char *help; \
                      int32_t provenance; uint32_t reserved; char value[DORMOUSE_TEXT_BYTES]; \
                      char reason[DORMOUSE_TEXT_BYTES];";
        assert_eq!(fields.collect::<Vec<_>>().join(" "), wanted);
    }

    #[test]
    fn the_library_is_looked_for_beside_the_program_and_in_its_installation() {
        let prefix = std::env::temp_dir().join(format!("dormouse-near-{}", std::process::id()));
        let package = prefix.join("lib/python3.12/site-packages/dormouse");
        std::fs::create_dir_all(&package).unwrap();
        let places = near(&prefix.join("bin/dormouse"));
        let wanted = [prefix.join("bin"), prefix.join("lib"), package].map(|dir| dir.join(NAME));
        assert_eq!(places, wanted);
        std::fs::remove_dir_all(&prefix).unwrap();
    }
}
