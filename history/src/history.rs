//! The histories of all prompts, in memory and in the file of cold prompts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::cold::{Cold, ColdPrompt};
use crate::digest::Digest;
use crate::draft::{Draft, Weighing};
use crate::error::HistoryError;
use crate::limits::{EPOCHS_KEPT_MAX, PROMPTS_MAX, VOCAB_MAX};
use crate::prompt::Prompt;

/// Settings of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Token ids are below this, which is at most [`VOCAB_MAX`].
    pub vocab: u32,
    /// Bytes of memory that prompts may take; beyond it the least recently used ones become cold.
    pub budget_bytes: u64,
    /// Epochs of a prompt whose responses are kept, the latest included.
    pub epochs_kept: u32,
    /// How votes are weighed.
    pub weighing: Weighing,
    /// Where cold prompts are, and how many bytes they may take. Without it they are forgotten.
    pub cold: Option<(PathBuf, u64)>,
}

impl Options {
    /// Returns the settings of a history in memory alone: 1 GiB, two epochs.
    #[must_use]
    pub const fn of_vocab(vocab: u32) -> Self {
        Self {
            vocab,
            budget_bytes: 1 << 30,
            epochs_kept: 2,
            weighing: Weighing::Reward,
            cold: None,
        }
    }

    fn check(&self) -> Result<(), HistoryError> {
        let in_range = |name, value: u32, max: u32| match value {
            1.. if value <= max => Ok(()),
            _ => Err(HistoryError::Range { name, value: value.into(), min: 1, max: max.into() }),
        };
        in_range("vocab", self.vocab, VOCAB_MAX)?;
        in_range("epochs_kept", self.epochs_kept, EPOCHS_KEPT_MAX)
    }
}

/// Figures of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryStats {
    /// Prompts in memory.
    pub prompts: u64,
    /// Recorded tokens in memory.
    pub tokens: u64,
    /// Bytes of memory that they take.
    pub bytes: u64,
    /// Prompts in the file of cold prompts.
    pub cold_prompts: u64,
    /// Bytes of that file in use.
    pub cold_bytes: u64,
    /// Prompts that were forgotten, because neither memory nor the file had room or the file failed.
    pub forgotten_prompts: u64,
    /// Drafted tokens on which [`History::count_feedback`] was told.
    pub drafted_tokens: u64,
    /// Those that were accepted.
    pub accepted_tokens: u64,
}

/// The earlier responses of prompts. Any-thread: drafts run beside each other; a record, and a draft of a cold
/// prompt, wait for them.
#[derive(Debug)]
pub struct History {
    options: Options,
    places: RwLock<Places>,
    cold: Option<Mutex<Cold>>,
    /// Counts uses.
    clock: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
}

#[derive(Debug, Default)]
struct Places {
    prompts: HashMap<Digest, Place>,
    bytes: u64,
    forgotten: u64,
    /// The reason that the last prompt was forgotten, if the file failed.
    failure: Option<String>,
}

#[derive(Debug)]
enum Place {
    Memory { prompt: Arc<Prompt>, used: AtomicU64 },
    File(ColdPrompt),
}

impl History {
    /// Makes an empty history.
    ///
    /// # Errors
    /// `Range`; `Cold` if the file of cold prompts cannot be made.
    pub fn new(options: Options) -> Result<Self, HistoryError> {
        options.check()?;
        let cold = options.cold.as_ref().map(|(dir, bytes)| Cold::create(dir, *bytes));
        Ok(Self::over(options, cold.transpose()?))
    }

    pub(crate) fn over(options: Options, cold: Option<Cold>) -> Self {
        Self {
            options,
            places: RwLock::default(),
            cold: cold.map(Mutex::new),
            clock: AtomicU64::new(0),
            drafted: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
        }
    }

    /// Returns the settings.
    #[must_use]
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Records a response to a prompt. The first of a later epoch forgets those of epochs that are no longer kept.
    ///
    /// # Errors
    /// `Id`, `Reward`, `Range`, `Limit`; `Epoch` for one that is no longer kept. Nothing is recorded then.
    pub fn record(
        &self,
        prompt: &[u32],
        response: &[u32],
        reward: f32,
        epoch: u32,
    ) -> Result<(), HistoryError> {
        self.check_ids("prompt", prompt)?;
        self.check_ids("response", response)?;
        if !reward.is_finite() {
            return Err(HistoryError::Reward { reward });
        }
        let digest = Digest::of(prompt);
        let mut places = self.places.write();
        if places.prompts.len() >= PROMPTS_MAX && !places.prompts.contains_key(&digest) {
            return Err(HistoryError::Limit { what: "prompts", max: PROMPTS_MAX as u64 });
        }
        // Out of the map while it changes: an error puts back what was there.
        let mut own =
            self.take(&mut places, digest).unwrap_or_else(|| Arc::new(Prompt::new(prompt)));
        let latest = own.extremes.latest_epoch;
        let min = latest.max(epoch).saturating_sub(self.options.epochs_kept - 1);
        let recorded = match epoch {
            _ if epoch < min => Err(HistoryError::Epoch { epoch, latest, min }),
            _ => Arc::make_mut(&mut own).record(response, reward, epoch, min),
        };
        if !own.responses.is_empty() {
            self.put(&mut places, digest, own);
        }
        self.shrink(&mut places, self.options.budget_bytes);
        recorded
    }

    /// Drafts at most `tokens_max` tokens that come next in a response to a prompt. `end`: the last tokens of the
    /// sequence, prompt included; more than [`crate::CONTEXT_TOKENS`] are not read. A prompt without responses has
    /// an empty draft.
    ///
    /// # Errors
    /// `Id`. A cold prompt that cannot be read is forgotten, and its draft is empty.
    pub fn draft(
        &self,
        prompt: Digest,
        end: &[u32],
        tokens_max: usize,
    ) -> Result<Draft, HistoryError> {
        self.check_ids("end", end)?;
        let found = self.find(prompt);
        let draft = |it: &Prompt| it.draft(end, tokens_max, self.options.weighing);
        Ok(found.as_deref().map(draft).unwrap_or_default())
    }

    /// Counts a draft of `drafted` tokens of which the first `accepted` were accepted.
    pub fn count_feedback(&self, drafted: u32, accepted: u32) {
        self.drafted.fetch_add(drafted.into(), Ordering::Relaxed);
        self.accepted.fetch_add(accepted.min(drafted).into(), Ordering::Relaxed);
    }

    /// Moves the least recently used prompts out of memory until at most `bytes` are in use.
    pub fn release(&self, bytes: u64) {
        self.shrink(&mut self.places.write(), bytes);
    }

    /// Forgets a prompt. Returns whether there was one.
    pub fn forget(&self, prompt: Digest) -> bool {
        self.take(&mut self.places.write(), prompt).is_some()
    }

    /// Returns figures.
    pub fn stats(&self) -> HistoryStats {
        let places = self.places.read();
        let mut stats = HistoryStats {
            bytes: places.bytes,
            forgotten_prompts: places.forgotten,
            cold_bytes: self.cold.as_ref().map_or(0, |cold| cold.lock().used_bytes()),
            drafted_tokens: self.drafted.load(Ordering::Relaxed),
            accepted_tokens: self.accepted.load(Ordering::Relaxed),
            ..HistoryStats::default()
        };
        for place in places.prompts.values() {
            match place {
                Place::Memory { prompt, .. } => {
                    stats.prompts += 1;
                    stats.tokens += prompt.recorded_tokens();
                }
                Place::File(_) => stats.cold_prompts += 1,
            }
        }
        stats
    }

    /// Returns the reason that the file of cold prompts last failed, if it did.
    pub fn cold_failure(&self) -> Option<String> {
        self.places.read().failure.clone()
    }

    /// Returns every prompt, cold ones read from the file, in the order of their digests.
    pub(crate) fn all(&self) -> Result<Vec<(Digest, Arc<Prompt>)>, HistoryError> {
        let places = self.places.read();
        let mut all = Vec::with_capacity(places.prompts.len());
        for (digest, place) in &places.prompts {
            let prompt = match place {
                Place::Memory { prompt, .. } => Arc::clone(prompt),
                Place::File(cold) => Arc::new(self.read_cold(cold)?),
            };
            all.push((*digest, prompt));
        }
        all.sort_unstable_by_key(|(digest, _)| *digest);
        Ok(all)
    }

    /// Replaces everything by these prompts.
    pub(crate) fn replace(&self, prompts: Vec<(Digest, Prompt)>) {
        let mut places = self.places.write();
        let old: Vec<Digest> = places.prompts.keys().copied().collect();
        for digest in old {
            self.remove(&mut places, digest);
        }
        for (digest, prompt) in prompts {
            self.put(&mut places, digest, Arc::new(prompt));
            self.shrink(&mut places, self.options.budget_bytes);
        }
    }

    pub(crate) fn check_ids(&self, name: &'static str, ids: &[u32]) -> Result<(), HistoryError> {
        let vocab = self.options.vocab;
        match ids.iter().position(|&id| id >= vocab) {
            None => Ok(()),
            Some(index) => {
                let id = ids.get(index).copied().unwrap_or_default().into();
                Err(HistoryError::Id { name, index, id, max: vocab - 1 })
            }
        }
    }

    /// Returns a prompt, in memory from now on if its budget allows.
    fn find(&self, digest: Digest) -> Option<Arc<Prompt>> {
        match self.places.read().prompts.get(&digest)? {
            Place::Memory { prompt, used } => {
                used.store(self.tick(), Ordering::Relaxed);
                return Some(Arc::clone(prompt));
            }
            Place::File(_) => {}
        }
        let mut places = self.places.write();
        let prompt = self.take(&mut places, digest)?;
        self.put(&mut places, digest, Arc::clone(&prompt));
        self.shrink(&mut places, self.options.budget_bytes);
        Some(prompt)
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn put(&self, places: &mut Places, digest: Digest, prompt: Arc<Prompt>) {
        places.bytes += prompt.bytes();
        let used = AtomicU64::new(self.tick());
        places.prompts.insert(digest, Place::Memory { prompt, used });
    }

    /// Takes a prompt out of the map; one that cannot be read is forgotten.
    fn take(&self, places: &mut Places, digest: Digest) -> Option<Arc<Prompt>> {
        match places.prompts.remove(&digest)? {
            Place::Memory { prompt, .. } => {
                places.bytes -= prompt.bytes();
                Some(prompt)
            }
            Place::File(cold) => {
                let read = self.read_cold(&cold);
                self.free(cold);
                match read {
                    Ok(prompt) => Some(Arc::new(prompt)),
                    Err(e) => {
                        places.forgotten += 1;
                        places.failure = Some(e.to_string());
                        None
                    }
                }
            }
        }
    }

    /// Takes a prompt out of the map, unread.
    fn remove(&self, places: &mut Places, digest: Digest) {
        match places.prompts.remove(&digest) {
            Some(Place::Memory { prompt, .. }) => places.bytes -= prompt.bytes(),
            Some(Place::File(cold)) => self.free(cold),
            None => {}
        }
    }

    fn read_cold(&self, place: &ColdPrompt) -> Result<Prompt, HistoryError> {
        let dir = || self.options.cold.as_ref().map(|(dir, _)| dir.clone()).unwrap_or_default();
        let damaged = |reason: &str| HistoryError::Damaged { path: dir(), reason: reason.into() };
        let cold = self.cold.as_ref().ok_or_else(|| damaged("no file of cold prompts"))?;
        let bytes = cold.lock().get(place)?;
        Prompt::decode(&bytes).map_err(|reason| damaged(&reason))
    }

    fn free(&self, place: ColdPrompt) {
        if let Some(cold) = &self.cold {
            cold.lock().remove(place);
        }
    }

    /// Moves the least recently used prompts to the file until at most `bytes` are in use. Those that do not go
    /// into it are forgotten: a history saves time, and memory is bounded.
    fn shrink(&self, places: &mut Places, bytes: u64) {
        if places.bytes <= bytes {
            return;
        }
        let mut by_use: Vec<(u64, Digest)> = (places.prompts.iter())
            .filter_map(|(digest, place)| match place {
                Place::Memory { used, .. } => Some((used.load(Ordering::Relaxed), *digest)),
                Place::File(_) => None,
            })
            .collect();
        by_use.sort_unstable();
        for (_, digest) in by_use {
            if places.bytes <= bytes {
                return;
            }
            let Some(prompt) = self.take(places, digest) else { continue };
            match self.spill(&prompt) {
                Ok(Some(cold)) => {
                    places.prompts.insert(digest, Place::File(cold));
                }
                Ok(None) => places.forgotten += 1,
                Err(e) => {
                    places.forgotten += 1;
                    places.failure = Some(e.to_string());
                }
            }
        }
    }

    fn spill(&self, prompt: &Prompt) -> Result<Option<ColdPrompt>, HistoryError> {
        let Some(cold) = &self.cold else { return Ok(None) };
        let mut bytes = Vec::new();
        prompt.encode(&mut bytes);
        Ok(Some(cold.lock().put(&bytes)?))
    }
}

/// Returns the directory of a path, the current one if it names none.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
