//! The environment table: one constant drives parsing, validation, help, the dump with
//! provenance, the C enumeration and `docs/params.md`.
//!
//! ```text
//!   built-in  <  file (DORMOUSE_CONFIG)  <  environment  <  options of dormouse_runtime_create
//! ```
//! Keys are independent: setting one never resets another. A bad value is an error that names
//! the key, the value, who set it and what is accepted; an unknown name is one warning.

mod docs;
mod load;
mod nearest;
mod table;
mod text;
mod values;

use std::ffi::CString;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use load::{Config, Override};
pub(crate) use table::Key;

use crate::abi::v1::structs::{DORMOUSE_TEXT_BYTES, dormouse_param_t};
use crate::fault::{self, Fault};
use crate::{note, status};

/// Most unknown names one process warns about.
const UNKNOWN_NOTES_MAX: usize = 8;

static IN_EFFECT: Mutex<Option<Arc<Config>>> = Mutex::new(None);
static TOLD: AtomicBool = AtomicBool::new(false);

/// Reads the file and the environment anew, puts `overrides` on top, and makes that the
/// configuration in effect. Help and warnings come out once per process.
pub(crate) fn load(overrides: &[Override]) -> Result<Arc<Config>, Fault> {
    let (config, unknown) = Config::from_process(overrides)
        .map_err(|sentence| Fault::new(status::DORMOUSE_ERR_CONFIG, sentence))?;
    let config = Arc::new(config);
    if !TOLD.swap(true, Ordering::Relaxed) {
        tell(&config, &unknown);
    }
    *IN_EFFECT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&config));
    Ok(config)
}

/// The configuration in effect, loaded where it is not yet.
pub(crate) fn in_effect() -> Result<Arc<Config>, Fault> {
    let known = IN_EFFECT.lock().unwrap_or_else(PoisonError::into_inner).clone();
    known.map_or_else(|| load(&[]), Ok)
}

fn tell(config: &Config, unknown: &[String]) {
    if config.switch(Key::Help) {
        note::write(text::help(config).as_bytes());
    }
    if config.switch(Key::WarnUnknown) {
        for name in unknown.iter().take(UNKNOWN_NOTES_MAX) {
            let guess = nearest::name(name)
                .map_or_else(String::new, |known| format!("; did you mean {known}?"));
            note::say(&format!(
                "unknown parameter {name}{guess} (DORMOUSE_WARN_UNKNOWN=0 silences this)"
            ));
        }
    }
}

/// Returns parameter `index` as C sees it, `None` past the end of the table.
pub(crate) fn describe(index: u32) -> Result<Option<dormouse_param_t>, Fault> {
    let Some(param) = table::TABLE.get(index as usize) else { return Ok(None) };
    let config = in_effect()?;
    let mut value = [0_u8; DORMOUSE_TEXT_BYTES];
    fault::copy_text(&config.setting(param.key).shown(), &mut value);
    Ok(Some(dormouse_param_t {
        size: 0,
        version: 0,
        name: param.name.as_ptr(),
        kind: param.kind.name().as_ptr(),
        built_in: param.built_in.as_ptr(),
        accepts: param.accepts.as_ptr(),
        help: param.help.as_ptr(),
        provenance: config.setting(param.key).provenance as i32,
        reserved: 0,
        value: value.map(|byte| byte as std::ffi::c_char),
    }))
}

/// Returns the message for an `index` past the end of the table.
pub(crate) fn end_text(index: u32) -> String {
    format!("index is {index}; accepted: 0 to {}", table::TABLE.len() - 1)
}

/// Writes the current configuration to `path`, replacing the file atomically.
pub(crate) fn dump_to(path: &Path) -> Result<(), Fault> {
    let text = text::dump(&*in_effect()?);
    replace(path, |file| file.write_all(text.as_bytes()))
}

/// Writes a file beside `path` and renames it over: readers see the old one or all of the new.
pub(crate) fn replace(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Fault> {
    let failed = |what: &str, error: &std::io::Error| {
        Fault::new(status::DORMOUSE_ERR_IO, format!("{what} {}: {error}", path.display()))
    };
    if path.file_name().is_none() || CString::new(path.as_os_str().as_encoded_bytes()).is_err() {
        return Err(Fault::argument(format!(
            "path is {:?}; the path of a file is accepted",
            path.display().to_string()
        )));
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.tmp", std::process::id()));
    let beside = Path::new(&beside);
    let file = std::fs::File::create(beside).map_err(|e| failed("could not create", &e))?;
    let mut file = std::io::BufWriter::new(file);
    let filled = fill(&mut file).and_then(|()| file.flush());
    let placed = filled.and_then(|()| std::fs::rename(beside, path));
    placed.map_err(|error| {
        let _gone_already = std::fs::remove_file(beside);
        failed("could not write", &error)
    })
}
