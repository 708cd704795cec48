//! The histories of all prompts, in memory and in the file of cold prompts.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_storage::{NvmeError, UNIT_BYTES};
use parking_lot::{Mutex, RwLock};

use crate::cold::{Cold, ColdPrompt};
use crate::digest::Digest;
use crate::draft::{Draft, Weighing};
use crate::error::HistoryError;
use crate::limits::{CONTEXT_TOKENS, EPOCHS_KEPT_MAX, PROMPTS_MAX, VOCAB_MAX};
use crate::prompt::Prompt;

/// Part of the budget that is free once it was exceeded: to find what was used least takes longer than a record.
const FREED_SHARE: u64 = 64;

/// Settings of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Token ids are below this, which is at most [`VOCAB_MAX`].
    pub vocab: u32,
    /// Bytes of memory that prompts may take; beyond it the least recently used ones become cold. The table of all
    /// prompts, which is not counted, takes some 100 bytes more for each, and for a cold one 4 bytes more for each
    /// [`dormouse_storage::CHUNK_BYTES`].
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
    /// Held by a save.
    pub(crate) saving: Mutex<()>,
    /// Counts uses, and moves into the file.
    clock: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Places {
    prompts: HashMap<Digest, Place>,
    bytes: u64,
    forgotten: u64,
    /// The reason that the last prompt was forgotten, if the file failed.
    failure: Option<String>,
}

#[derive(Debug)]
struct Place {
    used: AtomicU64,
    stored: Stored,
}

#[derive(Debug)]
enum Stored {
    Memory(Arc<Prompt>),
    /// `moved`: when it came there, of the clock.
    File {
        cold: ColdPrompt,
        moved: u64,
    },
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
            saving: Mutex::default(),
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
        self.check_ids("prompt", prompt, 0)?;
        self.check_ids("response", response, 0)?;
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
        self.keep_budget(&mut places);
        recorded
    }

    /// Drafts at most `tokens_max` tokens that come next in a response to a prompt. `end`: the last tokens of the
    /// sequence, prompt included; more than [`crate::CONTEXT_TOKENS`] are not read. A prompt without responses has
    /// an empty draft.
    ///
    /// # Errors
    /// `Id`. A cold prompt that cannot be read is forgotten, and its draft is empty. No other is forgotten for a draft.
    pub fn draft(
        &self,
        prompt: Digest,
        end: &[u32],
        tokens_max: usize,
    ) -> Result<Draft, HistoryError> {
        let before = end.len().saturating_sub(CONTEXT_TOKENS);
        let end = end.get(before..).unwrap_or_default();
        self.check_ids("end", end, before)?;
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
        self.shrink(&mut self.places.write(), bytes, Full::Forget);
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
            match &place.stored {
                Stored::Memory(prompt) => {
                    stats.prompts += 1;
                    stats.tokens += prompt.recorded_tokens();
                }
                Stored::File { .. } => stats.cold_prompts += 1,
            }
        }
        stats
    }

    /// Returns the reason that the file of cold prompts last failed, if it did.
    pub fn cold_failure(&self) -> Option<String> {
        self.places.read().failure.clone()
    }

    /// Returns all prompts, the least recently used first.
    pub(crate) fn by_use(&self) -> Vec<Digest> {
        let places = self.places.read();
        let used =
            |(digest, place): (&Digest, &Place)| (place.used.load(Ordering::Relaxed), *digest);
        let mut all: Vec<(u64, Digest)> = places.prompts.iter().map(used).collect();
        drop(places);
        all.sort_unstable();
        all.into_iter().map(|(_, digest)| digest).collect()
    }

    /// Returns a prompt, which stays where it is and counts as unused; `None` if it is forgotten, as one is that cannot
    /// be read.
    pub(crate) fn read(&self, digest: Digest) -> Option<Arc<Prompt>> {
        self.look_up(digest, |_| {}).map(|(prompt, _)| prompt)
    }

    /// Inserts a prompt, in memory or in the file. Returns `false`, and inserts nothing, if it is there.
    pub(crate) fn insert(&self, places: &mut Places, digest: Digest, prompt: Prompt) -> bool {
        if places.prompts.contains_key(&digest) {
            return false;
        }
        self.put(places, digest, Arc::new(prompt));
        self.keep_budget(places);
        true
    }

    /// Exchanges all prompts for others, and returns them.
    pub(crate) fn exchange(&self, mut places: Places) -> Places {
        let mut own = self.places.write();
        places.forgotten += own.forgotten;
        std::mem::replace(&mut own, places)
    }

    /// Takes everything out of the map, unread.
    pub(crate) fn clear(&self, places: &mut Places) {
        for (_, place) in places.prompts.drain() {
            if let Stored::File { cold, .. } = place.stored {
                self.free(cold);
            }
        }
        places.bytes = 0;
    }

    /// Checks the ids behind the first `before` of an argument.
    fn check_ids(
        &self,
        name: &'static str,
        ids: &[u32],
        before: usize,
    ) -> Result<(), HistoryError> {
        let vocab = self.options.vocab;
        match ids.iter().position(|&id| id >= vocab) {
            None => Ok(()),
            Some(index) => {
                let id = ids.get(index).copied().unwrap_or_default().into();
                Err(HistoryError::Id { name, index: before + index, id, max: vocab - 1 })
            }
        }
    }

    /// Returns a prompt, in memory from now on if its budget allows.
    fn find(&self, digest: Digest) -> Option<Arc<Prompt>> {
        let use_now = |place: &Place| place.used.store(self.tick(), Ordering::Relaxed);
        let (prompt, moved) = self.look_up(digest, use_now)?;
        if moved.is_some() {
            let mut places = self.places.write();
            if places.moved(digest) == moved {
                self.bring_in(&mut places, digest, &prompt);
            }
        }
        Some(prompt)
    }

    /// Moves a prompt of the file into memory if there is room, so nothing is forgotten for a draft.
    fn bring_in(&self, places: &mut Places, digest: Digest, prompt: &Arc<Prompt>) {
        let leaving = match self.make_room(places, prompt.bytes()) {
            Room::Enough => Vec::new(),
            Room::FileFull => match self.exchanged_for(places, prompt) {
                Some(leaving) => leaving,
                None => return,
            },
            Room::None => return,
        };
        self.remove(places, digest);
        self.put(places, digest, Arc::clone(prompt));
        for other in leaving {
            // What the disk does not take stays, and memory is beyond its budget until the next record.
            let _ = self.move_out(places, other);
        }
    }

    /// Returns the prompts that go into the place that one leaves in a full file, the least recently used first, if
    /// memory has room for it without them.
    fn exchanged_for(&self, places: &Places, prompt: &Prompt) -> Option<Vec<Digest>> {
        let (mut units, mut leaving) = (file_units(prompt), Vec::new());
        let mut surplus = (places.bytes + prompt.bytes()).saturating_sub(self.options.budget_bytes);
        let mut in_memory: Vec<(u64, Digest, &Prompt)> = places.in_memory().collect();
        in_memory.sort_unstable_by_key(|&(used, digest, _)| (used, digest));
        for (_, digest, other) in in_memory {
            if surplus == 0 {
                break;
            }
            if let Some(left) = units.checked_sub(file_units(other)) {
                units = left;
                surplus = surplus.saturating_sub(other.bytes());
                leaving.push(digest);
            }
        }
        (surplus == 0).then_some(leaving)
    }

    /// Returns a prompt and, if it is in the file, when it came there. One that cannot be read is forgotten.
    fn look_up(&self, digest: Digest, mark: impl Fn(&Place)) -> Option<(Arc<Prompt>, Option<u64>)> {
        loop {
            let places = self.places.read();
            let place = places.prompts.get(&digest)?;
            mark(place);
            // Other drafts go on while the disk reads.
            let (read, moved) = match &place.stored {
                Stored::Memory(prompt) => return Some((Arc::clone(prompt), None)),
                Stored::File { cold, moved } => (self.read_cold(cold), Some(*moved)),
            };
            drop(places);
            let failure = match read {
                Ok(prompt) => return Some((Arc::new(prompt), moved)),
                Err(failure) => failure,
            };
            let mut places = self.places.write();
            if places.moved(digest) == moved {
                self.remove(&mut places, digest);
                places.lose(&failure);
                return None;
            }
            // Meanwhile it came into memory, or to another place.
        }
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn put(&self, places: &mut Places, digest: Digest, prompt: Arc<Prompt>) {
        places.bytes += prompt.bytes();
        let used = AtomicU64::new(self.tick());
        places.prompts.insert(digest, Place { used, stored: Stored::Memory(prompt) });
    }

    /// Takes a prompt out of the map; one that cannot be read is forgotten.
    fn take(&self, places: &mut Places, digest: Digest) -> Option<Arc<Prompt>> {
        let read = match &places.prompts.get(&digest)?.stored {
            Stored::Memory(prompt) => Ok(Arc::clone(prompt)),
            Stored::File { cold, .. } => self.read_cold(cold).map(Arc::new),
        };
        self.remove(places, digest);
        read.inspect_err(|e| places.lose(e)).ok()
    }

    /// Takes a prompt out of the map, unread.
    fn remove(&self, places: &mut Places, digest: Digest) {
        match places.prompts.remove(&digest).map(|it| it.stored) {
            Some(Stored::Memory(prompt)) => places.bytes -= prompt.bytes(),
            Some(Stored::File { cold, .. }) => self.free(cold),
            None => {}
        }
    }

    fn read_cold(&self, place: &ColdPrompt) -> Result<Prompt, HistoryError> {
        let dir = || self.options.cold.as_ref().map(|(dir, _)| dir.clone()).unwrap_or_default();
        let damaged = |reason: &str| HistoryError::Damaged { path: dir(), reason: reason.into() };
        let cold = self.cold.as_ref().ok_or_else(|| damaged("no file of cold prompts"))?;
        let bytes = cold.lock().get(place)?;
        Prompt::decode(&bytes, self.options.vocab).map_err(|reason| damaged(&reason))
    }

    fn free(&self, place: ColdPrompt) {
        if let Some(cold) = &self.cold {
            cold.lock().remove(place);
        }
    }

    /// Ends a call that added to memory: it has at most its budget.
    fn keep_budget(&self, places: &mut Places) {
        let budget = self.options.budget_bytes;
        if places.bytes > budget {
            self.shrink(places, budget - budget / FREED_SHARE, Full::Forget);
        }
    }

    /// Makes room in memory for `bytes` more by moves of what was used less recently.
    fn make_room(&self, places: &mut Places, bytes: u64) -> Room {
        let budget = self.options.budget_bytes;
        let Some(room) = budget.checked_sub(bytes) else { return Room::None };
        if places.bytes <= room {
            return Room::Enough;
        }
        self.shrink(places, room.saturating_sub(budget / FREED_SHARE), Full::Keep)
    }

    /// Moves prompts to the file until at most `bytes` are in use: those first that are larger, then the least recently
    /// used ones.
    fn shrink(&self, places: &mut Places, bytes: u64, full: Full) -> Room {
        if places.bytes <= bytes {
            return Room::Enough;
        }
        let mut order: Vec<(bool, u64, Digest)> = (places.in_memory())
            .map(|(used, digest, prompt)| (prompt.bytes() <= bytes, used, digest))
            .collect();
        order.sort_unstable();
        for (_, _, digest) in order {
            if places.bytes <= bytes {
                break;
            }
            match (self.move_out(places, digest), full) {
                (Ok(true), _) => {}
                (Err(HistoryError::Cold(NvmeError::Full { .. })), Full::Keep) => {
                    return Room::FileFull;
                }
                (Ok(false) | Err(_), Full::Keep) => return Room::None,
                (Ok(false), Full::Forget) => {
                    self.remove(places, digest);
                    places.forgotten += 1;
                }
                (Err(e), Full::Forget) => {
                    self.remove(places, digest);
                    places.lose(&e);
                }
            }
        }
        if places.bytes <= bytes { Room::Enough } else { Room::None }
    }

    /// Moves a prompt to the file. Returns `false` if there is no file; on an error it stays in memory.
    fn move_out(&self, places: &mut Places, digest: Digest) -> Result<bool, HistoryError> {
        let Some(place) = places.prompts.get_mut(&digest) else { return Ok(true) };
        let Stored::Memory(prompt) = &place.stored else { return Ok(true) };
        let freed = prompt.bytes();
        let Some(cold) = self.spill(prompt)? else { return Ok(false) };
        place.stored = Stored::File { cold, moved: self.tick() };
        places.bytes -= freed;
        Ok(true)
    }

    fn spill(&self, prompt: &Prompt) -> Result<Option<ColdPrompt>, HistoryError> {
        let Some(cold) = &self.cold else { return Ok(None) };
        let mut bytes = Vec::new();
        prompt.encode(&mut bytes);
        Ok(Some(cold.lock().put(&bytes)?))
    }
}

/// Room in memory, after moves to the file.
#[derive(Clone, Copy)]
enum Room {
    Enough,
    /// The file is full.
    FileFull,
    /// There never is so much, there is no file, or it fails.
    None,
}

/// What happens to prompts that the file has no room for, or that it fails to write.
#[derive(Clone, Copy)]
enum Full {
    /// They are forgotten: a history saves time, and memory is bounded.
    Forget,
    /// They stay in memory.
    Keep,
}

/// Returns the units of the file that a prompt takes.
fn file_units(prompt: &Prompt) -> u64 {
    prompt.encoded_bytes().div_ceil(UNIT_BYTES as u64)
}

impl Places {
    /// Returns the prompts in memory, in no order, and when they were used.
    fn in_memory(&self) -> impl Iterator<Item = (u64, Digest, &Prompt)> {
        self.prompts.iter().filter_map(|(digest, place)| match &place.stored {
            Stored::Memory(prompt) => {
                Some((place.used.load(Ordering::Relaxed), *digest, prompt.as_ref()))
            }
            Stored::File { .. } => None,
        })
    }

    /// Returns when a prompt came into the file, if it is there.
    fn moved(&self, digest: Digest) -> Option<u64> {
        match self.prompts.get(&digest)?.stored {
            Stored::File { moved, .. } => Some(moved),
            Stored::Memory(_) => None,
        }
    }

    /// Counts a prompt that was forgotten because the file failed.
    fn lose(&mut self, reason: &HistoryError) {
        self.forgotten += 1;
        self.failure = Some(reason.to_string());
    }
}
