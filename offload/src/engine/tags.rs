//! Tags: a user's name for a set of regions that sleep and wake together.

use std::collections::BTreeMap;

use dormouse_device::Device;

use super::sleep::Initiator;
use super::{Engine, SleepOutcome, Waited};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier, label};
use dormouse_residency::region::SleepGoal;
use dormouse_storage::sync::lock;

/// Most tags at a time.
pub const TAGS_MAX: usize = 4096;
/// Longest name of a tag, in bytes.
pub const TAG_NAME_BYTES_MAX: usize = 64;

/// Names one tag; never 0, never reused. The number goes into `Request::tag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagId(pub u32);

#[derive(Debug)]
struct Tag {
    name: String,
    backup: bool,
    regions: Vec<RegionId>,
    /// Somebody is destroying it: nothing comes under it any more, nor falls asleep.
    is_going: bool,
}

/// All tags.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    by_id: BTreeMap<TagId, Tag>,
    last: u32,
}

impl<D: Device> Engine<D> {
    /// Makes a tag. Without `backup` its sleep drops the bytes and its wake gives zeroed pages.
    ///
    /// # Errors
    /// `Argument` for an empty, long or used name; `TooMany`.
    pub fn tag_create(&self, name: &str, backup: bool) -> Result<TagId, OffloadError> {
        if name.is_empty() || name.len() > TAG_NAME_BYTES_MAX {
            let accepted = format!("1 to {TAG_NAME_BYTES_MAX} bytes");
            return Err(OffloadError::argument("tag name", format!("{name:?}"), accepted));
        }
        let mut tags = lock(&self.tags);
        if tags.by_id.values().any(|t| t.name == name) {
            return Err(OffloadError::argument("tag name", format!("{name:?}"), "one not in use"));
        }
        if tags.by_id.len() >= TAGS_MAX || tags.last == u32::MAX {
            return Err(OffloadError::TooMany { what: "tags", limit: TAGS_MAX as u64 });
        }
        tags.last += 1;
        let id = TagId(tags.last);
        tags.by_id.insert(
            id,
            Tag { name: name.to_owned(), backup, regions: Vec::new(), is_going: false },
        );
        Ok(id)
    }

    /// Wakes what is asleep, gives it back to its owner, and forgets the name. Nothing is put under
    /// the tag meanwhile.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::wait_awake`], the tag then still there.
    pub fn tag_destroy(&self, tag: TagId) -> Result<(), OffloadError> {
        match lock(&self.tags).by_id.get_mut(&tag) {
            Some(found) if !found.is_going => found.is_going = true,
            _ => return Err(stale(tag)),
        }
        let given_back = self.give_back_under(tag);
        let mut tags = lock(&self.tags);
        if given_back.is_ok() {
            tags.by_id.remove(&tag);
        } else if let Some(found) = tags.by_id.get_mut(&tag) {
            found.is_going = false;
        }
        given_back
    }

    fn give_back_under(&self, tag: TagId) -> Result<(), OffloadError> {
        let regions = self.tag_regions(tag)?;
        self.wait_awake(&regions)?;
        for id in regions {
            match self.release(id) {
                // Freed by its owner meanwhile.
                Ok(()) | Err(OffloadError::Stale { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Puts the block around `address` under the tag.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::adopt`].
    pub fn tag_add(&self, tag: TagId, address: usize) -> Result<RegionId, OffloadError> {
        let name = self.tag_name(tag).ok_or_else(|| stale(tag))?;
        if let Some(id) = self.region_at(address)
            && self.tag_regions(tag)?.contains(&id)
        {
            return Ok(id);
        }
        let id = self.adopt(address, Role::Tagged, label(&name, None))?;
        let mut tags = lock(&self.tags);
        match tags.by_id.get_mut(&tag).filter(|tag| !tag.is_going) {
            Some(tag) => tag.regions.push(id),
            None => {
                drop(tags);
                // Destroyed meanwhile: the block stays its owner's.
                self.release(id)?;
                return Err(stale(tag));
            }
        }
        Ok(id)
    }

    /// Lets everything under the tag fall asleep, behind `after` and all that streams which the
    /// allocator knows to use it have by now: blocks added, and blocks allocated with its
    /// number in `Request::tag`.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::sleep`].
    pub fn tag_sleep(
        &self,
        tag: TagId,
        tier: Tier,
        after: &[D::Event],
    ) -> Result<SleepOutcome, OffloadError> {
        let backup = lock(&self.tags).by_id.get(&tag).filter(|t| !t.is_going).map(|t| t.backup);
        let backup = backup.ok_or_else(|| stale(tag))?;
        for block in self.allocator.blocks() {
            if block.tag == tag.0 && block.claimed.is_none() && !block.free_deferred {
                match self.tag_add(tag, block.range.start) {
                    // Freed, or claimed by somebody, between the look and here.
                    // Or one that shares its pages: it stays awake.
                    Ok(_)
                    | Err(
                        OffloadError::NotOurs { .. }
                        | OffloadError::Claimed { .. }
                        | OffloadError::NoWholePage { .. },
                    ) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        let regions = self.tag_regions(tag)?;
        let mut uses = self.uses_end(&regions)?;
        uses.extend_from_slice(after);
        if backup {
            return self.sleep(&regions, tier, &uses);
        }
        self.sleep_to(&regions, SleepGoal::Empty, &uses, Initiator::Caller)
    }

    /// Starts waking everything under the tag.
    ///
    /// # Errors
    /// `Stale`.
    pub fn tag_wake(&self, tag: TagId) -> Result<(), OffloadError> {
        self.wake(&self.tag_regions(tag)?)
    }

    /// Wakes everything under the tag, for users on any stream.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::wait_awake`].
    pub fn tag_wait(&self, tag: TagId) -> Result<Waited, OffloadError> {
        self.wait_awake(&self.tag_regions(tag)?)
    }

    /// The tag of that name.
    #[must_use]
    pub fn tag_of(&self, name: &str) -> Option<TagId> {
        lock(&self.tags).by_id.iter().find(|(_, t)| t.name == name).map(|(&id, _)| id)
    }

    /// A tag's name.
    #[must_use]
    pub fn tag_name(&self, tag: TagId) -> Option<String> {
        lock(&self.tags).by_id.get(&tag).map(|t| t.name.clone())
    }

    /// Regions under a tag that still exist.
    ///
    /// # Errors
    /// `Stale`.
    pub fn tag_regions(&self, tag: TagId) -> Result<Vec<RegionId>, OffloadError> {
        let mut tags = lock(&self.tags);
        let found = tags.by_id.get_mut(&tag).ok_or_else(|| stale(tag))?;
        found.regions.retain(|&id| self.table.with(id, |_| ()).is_some());
        Ok(found.regions.clone())
    }
}

fn stale(tag: TagId) -> OffloadError {
    OffloadError::Stale { what: "tag", id: tag.0.to_string() }
}
