//! Who is collecting: which layer and which tag this thread's new blocks belong to.
//!
//! Read on every heap allocation, so it is a few constant-initialised cells: no destructor, no
//! lazy initialisation, no lock.

use std::cell::Cell;

use dormouse_alloc::{ArenaId, ThreadShard};

use crate::fault::Fault;
use crate::status;

/// Most tags one thread may be inside at a time.
pub(crate) const TAG_DEPTH_MAX: usize = 16;

thread_local! {
    /// One cell: looking a thread's own variable up is a call of its own in a library.
    static COLLECTING: Cell<Collecting> = const { Cell::new(Collecting::NOTHING) };
    static TAGS: Cell<[u32; TAG_DEPTH_MAX]> = const { Cell::new([0; TAG_DEPTH_MAX]) };
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// What a new block of this thread belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Collecting {
    pub(crate) window: Window,
    /// The innermost tag this thread is inside; 0: none.
    pub(crate) tag: u32,
    /// The shard of the thread cache it uses while no window and no tag is open.
    plain_shard: Option<ThreadShard>,
}

impl Collecting {
    const NOTHING: Self = Self { window: Window::NONE, tag: 0, plain_shard: None };
}

/// What is open on this thread.
#[inline]
pub(crate) fn collecting() -> Collecting {
    COLLECTING.get()
}

/// A layer's window: whose blocks they are, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// The layer's number; 0: nobody's.
    pub(crate) scope: u64,
    /// Its node's arena.
    pub(crate) arena: Option<ArenaId>,
}

impl Window {
    /// No window.
    pub(crate) const NONE: Self = Self { scope: 0, arena: None };
}

/// The thread-cache shard of this thread, if its new blocks belong to no layer and no tag. `None`
/// before [`settled`].
#[inline]
pub(crate) fn shard_of_plain() -> Option<ThreadShard> {
    COLLECTING.with(|cell| cell.get().plain_shard)
}

/// What is open on this thread. Assigns it a thread-cache shard.
#[inline]
pub(crate) fn settled() -> Collecting {
    COLLECTING.with(|cell| settle(cell, cell.get()))
}

/// Makes `now` what is open, with a shard if nothing is.
#[inline]
fn settle(cell: &Cell<Collecting>, now: Collecting) -> Collecting {
    let is_plain = now.window == Window::NONE && now.tag == 0;
    let shard = || now.plain_shard.unwrap_or_else(ThreadShard::current);
    let settled = Collecting { plain_shard: is_plain.then(shard), ..now };
    cell.set(settled);
    settled
}

/// Opens a window on this thread, or closes it with [`Window::NONE`].
pub(crate) fn set_window(window: Window) {
    COLLECTING.with(|cell| settle(cell, Collecting { window, ..cell.get() }));
}

/// Makes `tag` the innermost.
fn set_tag(tag: u32) {
    COLLECTING.with(|cell| settle(cell, Collecting { tag, ..cell.get() }));
}

/// Goes inside `tag`.
pub(crate) fn enter_tag(tag: u32) -> Result<(), Fault> {
    let depth = DEPTH.get();
    let mut tags = TAGS.get();
    let Some(place) = tags.get_mut(depth) else {
        return Err(Fault::new(
            status::DORMOUSE_ERR_LIMIT,
            format!("this thread is inside {TAG_DEPTH_MAX} tags, the most"),
        ));
    };
    *place = tag;
    TAGS.set(tags);
    DEPTH.set(depth + 1);
    set_tag(tag);
    Ok(())
}

/// Leaves `tag`, which must be the innermost.
pub(crate) fn leave_tag(tag: u32) -> Result<(), Fault> {
    let depth = DEPTH.get();
    if depth == 0 || collecting().tag != tag {
        return Err(Fault::new(
            status::DORMOUSE_ERR_STATE,
            if depth == 0 {
                "this thread is inside no tag; leave is accepted after enter"
            } else {
                "this thread is inside another tag; the innermost is accepted"
            },
        ));
    }
    DEPTH.set(depth - 1);
    let outer = depth.checked_sub(2).and_then(|at| TAGS.get().get(at).copied());
    set_tag(outer.unwrap_or(0));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> u32 {
        collecting().tag
    }

    fn window() -> Window {
        collecting().window
    }

    #[test]
    fn the_innermost_tag_wins_and_leaves_first() {
        enter_tag(5).unwrap();
        enter_tag(7).unwrap();
        assert_eq!(tag(), 7);
        assert_eq!(leave_tag(5).unwrap_err().status, status::DORMOUSE_ERR_STATE);
        leave_tag(7).unwrap();
        assert_eq!(tag(), 5);
        leave_tag(5).unwrap();
        assert_eq!((tag(), leave_tag(5).unwrap_err().status), (0, status::DORMOUSE_ERR_STATE));
    }

    #[test]
    fn depth_has_its_limit_and_the_limit_loses_nothing() {
        for at in 0..TAG_DEPTH_MAX {
            enter_tag(at as u32 + 1).unwrap();
        }
        assert_eq!(enter_tag(99).unwrap_err().status, status::DORMOUSE_ERR_LIMIT);
        assert_eq!(tag(), TAG_DEPTH_MAX as u32);
        for at in (0..TAG_DEPTH_MAX).rev() {
            leave_tag(at as u32 + 1).unwrap();
        }
    }

    #[test]
    fn each_thread_collects_for_itself() {
        set_window(Window { scope: 3, arena: None });
        assert_eq!(std::thread::spawn(window).join().unwrap(), Window::NONE);
        set_window(Window::NONE);
    }
}
