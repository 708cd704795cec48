//! The rules played out one nanosecond at a time: everything that may happen, happens.
//!
//! It shares nothing with the search but the works it is given: no ends to jump to, no bound, no
//! moment that stands for others.

use std::collections::HashSet;

use crate::plan::work::StepWork;

/// Where a group is; in flight with the nanoseconds left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Spot {
    Unmade,
    Device { has_slept: bool },
    Out(u64),
    OutToFile(u64),
    Host { was_written: bool },
    Write(u64),
    File,
    Read(u64),
    In(u64),
    InFromFile(u64),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    operation: usize,
    /// Nanoseconds left of it, where it runs.
    left: Option<u64>,
    spots: Vec<Spot>,
}

/// The least time in which `work` can end; `None` where it cannot, or not in `limit_ns`.
pub(super) fn oracle_ns(work: &StepWork, limit_ns: u64) -> Option<u64> {
    let start = World { operation: 0, left: None, spots: vec![Spot::Unmade; work.groups.len()] };
    let mut worlds = HashSet::from([start]);
    for now_ns in 0..=limit_ns {
        worlds = at_one_instant(work, worlds);
        if worlds.iter().any(|world| world.operation == work.operations.len()) {
            return Some(now_ns);
        }
        worlds = worlds.into_iter().filter_map(after_one_ns).collect();
    }
    None
}

/// All that can be made of `worlds` while no time goes by.
fn at_one_instant(work: &StepWork, worlds: HashSet<World>) -> HashSet<World> {
    let mut all = HashSet::new();
    let mut open: Vec<World> = worlds.into_iter().collect();
    while let Some(world) = open.pop() {
        if all.insert(world.clone()) {
            open.extend(next_steps(work, &world));
        }
    }
    all
}

/// `None` where something is over and has not ended.
fn after_one_ns(mut world: World) -> Option<World> {
    if let Some(left) = &mut world.left {
        *left = left.checked_sub(1)?;
    }
    for spot in &mut world.spots {
        match spot {
            Spot::Out(left)
            | Spot::OutToFile(left)
            | Spot::Write(left)
            | Spot::Read(left)
            | Spot::In(left)
            | Spot::InFromFile(left) => *left = left.checked_sub(1)?,
            _ => {}
        }
    }
    Some(world)
}

fn next_steps(work: &StepWork, world: &World) -> Vec<World> {
    let mut steps = Vec::new();
    if world.operation == work.operations.len() {
        return steps;
    }
    match world.left {
        None => steps.extend(with_operation_begun(work, world)),
        Some(0) => {
            let mut next = world.clone();
            for (group, spot) in work.groups.iter().zip(&mut next.spots) {
                if group.freed == world.operation {
                    *spot = Spot::Gone;
                }
            }
            next.left = None;
            next.operation += 1;
            steps.push(next);
        }
        Some(_) => {}
    }
    for at in 0..work.groups.len() {
        for spot in next_spots(work, world, at) {
            let mut next = world.clone();
            next.spots[at] = spot;
            steps.push(next);
        }
    }
    steps
}

fn with_operation_begun(work: &StepWork, world: &World) -> Option<World> {
    let mut next = world.clone();
    for (group, spot) in work.groups.iter().zip(&mut next.spots) {
        if group.made == world.operation {
            *spot = Spot::Device { has_slept: false };
        }
        let is_touched = group.needed <= world.operation && world.operation <= group.freed;
        if is_touched && !matches!(spot, Spot::Device { .. }) {
            return None;
        }
    }
    let operation = work.operations[world.operation];
    next.left = Some(operation.compute_ns);
    (device_bytes(work, &next) <= operation.room_bytes).then_some(next)
}

/// Where group `at` can go at this instant.
fn next_spots(work: &StepWork, world: &World, at: usize) -> Vec<Spot> {
    let group = work.groups[at];
    let spot = world.spots[at];
    let links = work.links;
    let ns = |rate: u64| (group.bytes * 1_000_000_000).div_ceil(rate);
    let is_free = |uses: fn(Spot) -> bool| !world.spots.iter().any(|&spot| uses(spot));
    let room_bytes = work.operations[world.operation].room_bytes;
    let fits_device = device_bytes(work, world) + group.bytes <= room_bytes;
    let fits_host = host_bytes(work, world) + group.bytes <= work.host_bytes;
    let fits_file = file_bytes(work, world) + group.bytes <= work.nvme_bytes;
    let on_write = |spot| matches!(spot, Spot::Write(_) | Spot::OutToFile(_));
    let on_read = |spot| matches!(spot, Spot::Read(_) | Spot::InFromFile(_));
    let may_write = links.device_to_nvme_bytes_per_s > 0 && fits_file && is_free(on_write);
    let may_read = links.nvme_to_device_bytes_per_s > 0 && is_free(on_read);
    let mut spots = Vec::new();
    match spot {
        Spot::Out(0) => spots.push(Spot::Host { was_written: false }),
        Spot::OutToFile(0) | Spot::Write(0) => spots.push(Spot::File),
        Spot::Read(0) => spots.push(Spot::Host { was_written: true }),
        Spot::In(0) | Spot::InFromFile(0) => spots.push(Spot::Device { has_slept: true }),
        Spot::Device { has_slept: false } => {
            let is_not_needed_yet = world.operation < group.needed
                || (world.operation == group.needed && world.left.is_none());
            let may_leave = world.operation > group.leaves && is_not_needed_yet;
            let is_out_free = is_free(|spot| matches!(spot, Spot::Out(_)));
            if may_leave && links.device_to_host_bytes_per_s > 0 && fits_host && is_out_free {
                spots.push(Spot::Out(ns(links.device_to_host_bytes_per_s)));
            }
            if may_leave && work.is_direct && may_write {
                spots.push(Spot::OutToFile(ns(links.device_to_nvme_bytes_per_s)));
            }
        }
        Spot::Host { was_written } => {
            if !was_written && !work.is_direct && may_write {
                spots.push(Spot::Write(ns(links.device_to_nvme_bytes_per_s)));
            }
            let is_in_free = is_free(|spot| matches!(spot, Spot::In(_)));
            if links.host_to_device_bytes_per_s > 0 && fits_device && is_in_free {
                spots.push(Spot::In(ns(links.host_to_device_bytes_per_s)));
            }
        }
        Spot::File if work.is_direct && may_read && fits_device => {
            spots.push(Spot::InFromFile(ns(links.nvme_to_device_bytes_per_s)));
        }
        Spot::File if !work.is_direct && may_read && fits_host => {
            spots.push(Spot::Read(ns(links.nvme_to_device_bytes_per_s)));
        }
        _ => {}
    }
    spots
}

fn sum_of(work: &StepWork, world: &World, counts: fn(Spot) -> bool) -> u64 {
    let groups = work.groups.iter().zip(&world.spots);
    groups.filter(|&(_, &spot)| counts(spot)).map(|(group, _)| group.bytes).sum()
}

fn device_bytes(work: &StepWork, world: &World) -> u64 {
    sum_of(work, world, |spot| {
        let is_leaving = matches!(spot, Spot::Out(_) | Spot::OutToFile(_));
        is_leaving || matches!(spot, Spot::Device { .. } | Spot::In(_) | Spot::InFromFile(_))
    })
}

fn host_bytes(work: &StepWork, world: &World) -> u64 {
    sum_of(work, world, |spot| {
        let is_in_flight = matches!(spot, Spot::Out(_) | Spot::Write(_) | Spot::In(_));
        is_in_flight || matches!(spot, Spot::Host { .. } | Spot::Read(_))
    })
}

fn file_bytes(work: &StepWork, world: &World) -> u64 {
    sum_of(work, world, |spot| {
        let is_leaving = matches!(spot, Spot::OutToFile(_) | Spot::Write(_));
        is_leaving || matches!(spot, Spot::File | Spot::Read(_) | Spot::InFromFile(_))
    })
}
