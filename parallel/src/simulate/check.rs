//! Whether a world makes sense: what the engine relies on.

use super::SimulateError;
use super::world::{BLOCKS_MAX, CopyLink, STEPS_MAX, SimulatedRank, SleepTier, Tier, World};

/// How often an exchange was sent and received.
#[derive(Clone, Copy, Default)]
struct Ends {
    sent: u32,
    received: u32,
}

pub(super) fn check(world: &World) -> Result<(), SimulateError> {
    let most = |what, seen: usize, most: usize| {
        if seen <= most { Ok(()) } else { Err(SimulateError::Count { what, seen, most }) }
    };
    most("steps", world.ranks.iter().map(|rank| rank.steps.len()).sum(), STEPS_MAX)?;
    most("blocks", world.ranks.iter().map(|rank| rank.block_bytes.len()).sum(), BLOCKS_MAX)?;
    most("exchanges", world.exchanges.len(), BLOCKS_MAX)?;
    let mut ends = vec![Ends::default(); world.exchanges.len()];
    for (number, rank) in world.ranks.iter().enumerate() {
        check_blocks(number, rank)?;
        count_ends(world, number as u32, rank, &mut ends)?;
    }
    match ends.iter().position(|ends| [ends.sent, ends.received] != [1, 1]) {
        None => Ok(()),
        Some(exchange) => Err(SimulateError::Exchange {
            exchange: exchange as u32,
            problem: "is not sent once and received once",
        }),
    }
}

fn count_ends(
    world: &World,
    number: u32,
    rank: &SimulatedRank,
    ends: &mut [Ends],
) -> Result<(), SimulateError> {
    for step in &rank.steps {
        let sends = step.sends.iter().map(|exchange| (*exchange, true));
        for (exchange, sends) in sends.chain(step.receives.iter().map(|id| (*id, false))) {
            let Some(known) = world.exchanges.get(exchange as usize) else {
                return Err(SimulateError::Exchange { exchange, problem: "is not known" });
            };
            if number != if sends { known.from } else { known.to } {
                return Err(SimulateError::Exchange { exchange, problem: "is another rank's" });
            }
            let ends = &mut ends[exchange as usize];
            let count = if sends { &mut ends.sent } else { &mut ends.received };
            *count = count.saturating_add(1);
        }
    }
    Ok(())
}

/// Every block made once, used only while it is there, and small enough for the tiers it visits.
fn check_blocks(number: usize, rank: &SimulatedRank) -> Result<(), SimulateError> {
    #[derive(Clone, Copy, PartialEq)]
    enum Life {
        Before,
        There,
        Gone,
    }
    let mut lives = vec![Life::Before; rank.block_bytes.len()];
    for (index, step) in rank.steps.iter().enumerate() {
        let fault = |block: u32, problem| {
            Err(SimulateError::Block { rank: number, step: index, block, problem })
        };
        for &block in &step.wakes {
            if lives.get(block as usize) != Some(&Life::There) {
                return fault(block, "is woken, and is not there");
            }
        }
        for &block in &step.needs {
            if lives.get(block as usize) != Some(&Life::There) {
                return fault(block, "is needed, and was not made before");
            }
        }
        for &block in &step.allocates {
            match lives.get_mut(block as usize) {
                Some(life) if *life == Life::Before => *life = Life::There,
                Some(_) => return fault(block, "is made a second time"),
                None => return fault(block, "has no size"),
            }
            check_room(number, rank, block, Tier::Device)?;
        }
        for &block in &step.frees {
            match lives.get_mut(block as usize) {
                Some(life) if *life == Life::There => *life = Life::Gone,
                _ => return fault(block, "is freed, and is not there"),
            }
        }
        for sleep in &step.sleeps {
            if lives.get(sleep.block as usize) != Some(&Life::There) {
                return fault(sleep.block, "is told to sleep, and is not there");
            }
            check_room(number, rank, sleep.block, Tier::Host)?;
            let host = [CopyLink::Sleep, CopyLink::Wake];
            let file = [CopyLink::Write, CopyLink::Read];
            let links =
                host.into_iter().chain(file.into_iter().filter(|_| sleep.tier == SleepTier::File));
            for link in links {
                if link.bytes_per_s(&rank.machine) == 0 {
                    return Err(SimulateError::Rate { rank: number, link });
                }
            }
        }
    }
    Ok(())
}

fn check_room(
    number: usize,
    rank: &SimulatedRank,
    block: u32,
    tier: Tier,
) -> Result<(), SimulateError> {
    let seen = rank.block_bytes[block as usize];
    let most = match tier {
        Tier::Device => rank.machine.device_bytes,
        Tier::Host => rank.machine.host_bytes,
        Tier::File => 0,
    };
    if most > 0 && seen > most {
        return Err(SimulateError::TooLarge { rank: number, block, seen, tier, most });
    }
    Ok(())
}
