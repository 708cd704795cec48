//! Pages read at one moment, and what two readings say about each process.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_timeline::ClockAnchor;
use dormouse_timeline::live::{
    DumpFigures, Figures, Live, LiveError, SETTINGS, SettingFigure, TagFigures, default_pages, read,
};
use serde::Serialize;

use crate::args::Order;
use crate::text::lossy;

/// Maximum number of pages shown.
const PAGES_MAX: usize = 1024;
/// Age of an update after which a process is called silent: a page is updated ten times a second.
const SILENT_NS: u64 = 3_000_000_000;
const NS_PER_S: f64 = 1e9;

const TIERS: [&str; 3] = ["device", "host", "nvme"];
const LINKS: [&str; 4] = ["device_to_host", "host_to_device", "nvme_write", "nvme_read"];

/// Pages at one moment.
#[derive(Debug)]
pub(crate) struct Reading {
    at_ns: u64,
    unix_ns: u64,
    pages: Vec<(PathBuf, Result<Live, LiveError>)>,
}

impl Reading {
    /// Reads the pages at `paths`, or those of this user's processes, each once.
    pub(crate) fn of(paths: &[PathBuf]) -> Self {
        let (mut pages, mut files) = (Vec::new(), HashSet::new());
        let mut add = |path: PathBuf, is_named: bool| {
            let file = fs::symlink_metadata(&path).map(|found| (found.dev(), found.ino()));
            if !file.map_or(true, |file| files.insert(file)) {
                return;
            }
            let live = read(&path);
            // A directory may hold other files, and a process may end while it is looked for.
            if pages.len() < PAGES_MAX && (is_named || live.is_ok()) {
                pages.push((path, live));
            }
        };
        if paths.is_empty() {
            default_pages().into_iter().for_each(|path| add(path, false));
        }
        for path in paths {
            if path.is_dir() {
                entries(path).into_iter().for_each(|path| add(path, false));
            } else {
                add(path.clone(), true);
            }
        }
        let now = ClockAnchor::now();
        Self { at_ns: now.monotonic_ns, unix_ns: now.realtime_ns, pages }
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The processes of a reading.
#[derive(Debug, Default, Serialize)]
pub(crate) struct States {
    pub(crate) processes: Vec<State>,
    pub(crate) unreadable: Vec<Unreadable>,
    #[serde(skip)]
    pub(crate) order: Order,
}

/// A page named that could not be read.
#[derive(Debug, Serialize)]
pub(crate) struct Unreadable {
    #[serde(serialize_with = "lossy")]
    pub(crate) page: PathBuf,
    pub(crate) reason: String,
}

/// What became of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// It updates its page.
    Running,
    /// It has the page, and does not update it: it is stopped, or the machine is overloaded.
    Silent,
    /// It has ended without removing its page: it was killed.
    Ended,
}

/// One process.
#[derive(Debug, Serialize)]
pub(crate) struct State {
    #[serde(serialize_with = "lossy")]
    pub(crate) page: PathBuf,
    pub(crate) name: String,
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    pub(crate) status: Status,
    pub(crate) age_s: f64,
    pub(crate) tiers: BTreeMap<&'static str, TierState>,
    pub(crate) links: BTreeMap<&'static str, LinkState>,
    pub(crate) stall_s: f64,
    /// Share of the interval; above 1 if several threads wait. `None` without an update in it.
    pub(crate) stall_share: Option<f64>,
    pub(crate) asleep_bytes: u64,
    pub(crate) cached_bytes: u64,
    pub(crate) alloc_failures: u64,
    pub(crate) tag_count: u64,
    /// The largest tags.
    pub(crate) tags: Vec<TagState>,
    pub(crate) last_dump: Option<DumpState>,
    /// Settings with a value, by the names of their parameters.
    pub(crate) settings: BTreeMap<&'static str, SettingState>,
}

/// A setting that the runtime may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SettingState {
    pub(crate) value: u64,
    pub(crate) is_automatic: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TagState {
    pub(crate) name: String,
    pub(crate) resident_bytes: u64,
    pub(crate) asleep_bytes: u64,
}

/// The dump that a process has written last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DumpState {
    pub(crate) path: String,
    pub(crate) reason: String,
    pub(crate) written_unix_s: f64,
    pub(crate) age_s: f64,
}

impl DumpState {
    fn of(dump: &DumpFigures, unix_ns: u64) -> Self {
        Self {
            path: dump.path.clone(),
            reason: dump.reason.clone(),
            written_unix_s: dump.written_unix_ns as f64 / NS_PER_S,
            age_s: unix_ns.saturating_sub(dump.written_unix_ns) as f64 / NS_PER_S,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TierState {
    pub(crate) used_bytes: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) budget_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct LinkState {
    pub(crate) copied_bytes: u64,
    /// Over the interval, pauses included. `None` without an update in it.
    pub(crate) bytes_per_s: Option<f64>,
    /// While copies ran; 0 if unknown.
    pub(crate) measured_bytes_per_s: u64,
}

impl States {
    /// Compares two readings of the same pages.
    pub(crate) fn between(before: &Reading, after: &Reading) -> Self {
        let mut states = Self::default();
        for (page, live) in &after.pages {
            match live {
                Ok(live) => {
                    let earlier = before.pages.iter().find(|(path, _)| path == page);
                    let earlier = earlier.and_then(|(_, live)| live.as_ref().ok());
                    states.processes.push(State::of(page, live, earlier, after));
                }
                Err(error) => {
                    let reason = error.to_string();
                    states.unreadable.push(Unreadable { page: page.clone(), reason });
                }
            }
        }
        states
    }

    pub(crate) fn sort(&mut self, order: Order) {
        self.order = order;
        self.processes.sort_by(|a, b| {
            let by_rank = || a.rank.cmp(&b.rank);
            let wanted = match order {
                Order::Rank => by_rank(),
                Order::Device => {
                    b.device_used_bytes().cmp(&a.device_used_bytes()).then_with(by_rank)
                }
                Order::Stall => b.stalled().total_cmp(&a.stalled()).then_with(by_rank),
                Order::Pid => std::cmp::Ordering::Equal,
            };
            wanted.then(a.pid.cmp(&b.pid))
        });
    }
}

impl State {
    fn of(page: &Path, live: &Live, earlier: Option<&Live>, now: &Reading) -> Self {
        let figures = &live.figures;
        let age_ns = now.at_ns.saturating_sub(figures.updated_ns);
        let status = match live.is_running {
            false => Status::Ended,
            true if age_ns > SILENT_NS => Status::Silent,
            true => Status::Running,
        };
        let is_same =
            |it: &&Live| (&it.process, it.started_unix_ns) == (&live.process, live.started_unix_ns);
        let since = earlier.filter(is_same).and_then(|it| Since::of(&it.figures, figures));
        let tier = |at: usize| TierState {
            used_bytes: figures.tier_used_bytes[at],
            peak_bytes: figures.tier_peak_bytes[at],
            budget_bytes: figures.tier_budget_bytes[at],
        };
        let link = |at: usize| LinkState {
            copied_bytes: figures.link_copied_bytes[at],
            bytes_per_s: since.map(|since| since.link_bytes_per_s[at]),
            measured_bytes_per_s: figures.link_bytes_per_s[at],
        };
        let tag = |it: &TagFigures| TagState {
            name: it.name.clone(),
            resident_bytes: it.resident_bytes,
            asleep_bytes: it.asleep_bytes,
        };
        let settings = SETTINGS.iter().zip(&figures.settings).filter(|(_, it)| it.value != 0);
        let setting =
            |it: &SettingFigure| SettingState { value: it.value, is_automatic: it.is_automatic };
        Self {
            page: page.to_owned(),
            name: live.process.name.clone(),
            rank: live.process.rank,
            pid: live.process.pid,
            status,
            age_s: age_ns as f64 / NS_PER_S,
            tiers: TIERS.iter().enumerate().map(|(at, name)| (*name, tier(at))).collect(),
            links: LINKS.iter().enumerate().map(|(at, name)| (*name, link(at))).collect(),
            stall_s: figures.stall_ns as f64 / NS_PER_S,
            stall_share: since.map(|since| since.stall_share),
            asleep_bytes: figures.asleep_bytes,
            cached_bytes: figures.cached_bytes,
            alloc_failures: figures.alloc_failures,
            tag_count: figures.tag_count,
            tags: figures.tags.iter().map(tag).collect(),
            last_dump: figures.last_dump.as_ref().map(|it| DumpState::of(it, now.unix_ns)),
            settings: settings.map(|(name, it)| (*name, setting(it))).collect(),
        }
    }

    fn stalled(&self) -> f64 {
        self.stall_share.unwrap_or(0.0)
    }

    fn device_used_bytes(&self) -> u64 {
        self.tiers.get(TIERS[0]).map_or(0, |tier| tier.used_bytes)
    }
}

/// Differences of two updates over the time between them.
#[derive(Clone, Copy, Debug)]
struct Since {
    link_bytes_per_s: [f64; 4],
    stall_share: f64,
}

impl Since {
    /// `None` if there was no update in between.
    fn of(before: &Figures, after: &Figures) -> Option<Self> {
        let elapsed_ns = after.updated_ns.checked_sub(before.updated_ns).filter(|ns| *ns > 0)?;
        let rate =
            |before: u64, after: u64| after.saturating_sub(before) as f64 / elapsed_ns as f64;
        Some(Self {
            link_bytes_per_s: std::array::from_fn(|at| {
                rate(before.link_copied_bytes[at], after.link_copied_bytes[at]) * NS_PER_S
            }),
            stall_share: rate(before.stall_ns, after.stall_ns),
        })
    }
}
