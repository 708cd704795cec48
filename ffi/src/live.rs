//! The page of live figures (`DORMOUSE_STATS_FILE`) and the thread that updates it. See
//! `docs/decisions/0021-live-figures.md`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_device::with_signals_blocked;
use dormouse_timeline::live::{
    Figures, LivePage, SETTINGS, SettingFigure, free_place, remove_ended,
};

use crate::dumps::process;
use crate::fault::Fault;
use crate::params::{Config, Key};
use crate::{log, status};

/// Maximum number of updates per second.
const UPDATES_PER_S_MAX: u32 = 10;

/// The keys of [`SETTINGS`].
const SETTING_KEYS: [Key; SETTINGS.len()] =
    [Key::HostBudget, Key::NvmeFile, Key::NvmeDepth, Key::IoThreads, Key::Inflight, Key::Window];

/// Value of `DORMOUSE_STATS_FILE` for no page.
const OFF: &str = "off";

/// Creates the page at the configured path, if it is not `off`. At the built-in path, a failure is no error,
/// the page of a running process stays, and pages that killed processes left are removed.
pub(crate) fn create(config: &Config, figures: &Figures) -> Result<Option<LivePage>, Fault> {
    let Some(path) = config.path(Key::StatsFile).filter(|path| *path != Path::new(OFF)) else {
        return Ok(None);
    };
    let page = log::expand_path(path).and_then(|path| {
        let path = Path::new(&path);
        let place = if is_built_in(config) { free_place(path) } else { path.to_owned() };
        LivePage::create(&place, &process(), figures).map_err(|error| error.to_string())
    });
    match page {
        Ok(page) => {
            if is_built_in(config) {
                remove_ended();
            }
            Ok(Some(page))
        }
        Err(reason) if is_built_in(config) => {
            tracing::debug!(target: "ffi", reason, "no file of live figures");
            Ok(None)
        }
        Err(why) => Err(Fault::new(
            status::DORMOUSE_ERR_CONFIG,
            format!(
                "DORMOUSE_STATS_FILE is {:?} ({why})",
                config.setting(Key::StatsFile).to_text()
            ),
        )),
    }
}

/// Whether the page has the path of processes that name none.
pub(crate) fn is_built_in(config: &Config) -> bool {
    !config.is_chosen(Key::StatsFile)
}

/// Returns the settings of a page.
pub(crate) fn settings(config: &Config) -> [SettingFigure; SETTINGS.len()] {
    SETTING_KEYS.map(|key| SettingFigure {
        value: config.number(key),
        is_automatic: config.is_automatic(key),
    })
}

/// The thread that updates a page. A forked child has no such thread. A drop ends the thread and removes
/// the file.
#[derive(Debug)]
pub(crate) struct Publisher {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Publishes `figures`, now and until the drop. `None`, with a warning, if the system refuses a
    /// thread.
    pub(crate) fn start(
        mut page: LivePage,
        figures: impl Fn() -> Figures + Send + 'static,
    ) -> Option<Self> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_stopped);
        let mut is_intact = page.publish(&figures());
        let body = move || {
            while is_intact {
                std::thread::park_timeout(Duration::from_secs(1) / UPDATES_PER_S_MAX);
                if seen.load(Ordering::Acquire) {
                    return;
                }
                is_intact = page.publish(&figures());
            }
            tracing::warn!(target: "ffi", "the file of live figures was truncated, or the program closed its descriptor; updates end");
        };
        let builder = std::thread::Builder::new().name("dormouse-live".to_owned());
        let spawned = with_signals_blocked(|| builder.spawn(body));
        if let Err(error) = &spawned {
            tracing::warn!(target: "ffi", %error, "no thread for live figures");
        }
        Some(Self { is_stopped, thread: Some(spawned.ok()?) })
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread has ended the updates; nothing waits for them.
            let _panicked = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use dormouse_timeline::live::{DEFAULT_DIR, default_prefix};

    use crate::params::{Choices, Machine};

    use super::*;

    #[test]
    fn a_page_has_every_setting_that_the_runtime_may_choose() {
        assert_eq!(SETTING_KEYS.map(Key::name), SETTINGS);
        let automatic = Choices::of(&Machine::read(&Config::built_in())).keys();
        assert_eq!(automatic.len(), SETTINGS.len());
        assert!(automatic.iter().all(|key| SETTING_KEYS.contains(key)), "{automatic:?}");
    }

    #[test]
    fn the_built_in_path_is_where_readers_look() {
        let path = log::expand_path(Config::built_in().path(Key::StatsFile).unwrap()).unwrap();
        let prefix = default_prefix().unwrap();
        assert_eq!(path, format!("{DEFAULT_DIR}/{prefix}{}", std::process::id()));
    }
}
