//! Validation of a world before it is simulated.

use super::SimulateError;
use super::world::{BLOCKS_MAX, STEPS_MAX, SimulatedRank, World, capacity_bytes, link_rates};
use dormouse_residency::{LinkDirection, Tier};
use dormouse_schedule::{PlanError, check_range};

pub(super) fn check(world: &World) -> Result<(), SimulateError> {
    let steps = world.ranks.iter().map(|rank| rank.steps.len()).sum();
    let blocks = world.ranks.iter().map(|rank| rank.block_bytes.len()).sum();
    check_sizes(steps, blocks)?;
    check_range("exchanges", world.exchanges.len() as u64, 0, BLOCKS_MAX as u64)?;
    // Numbers of sends and receives of each exchange.
    let mut ends = vec![[0_u32; 2]; world.exchanges.len()];
    for (number, rank) in world.ranks.iter().enumerate() {
        check_blocks(number, rank)?;
        count_ends(world, number as u32, rank, &mut ends)?;
    }
    match ends.iter().position(|ends| *ends != [1, 1]) {
        None => Ok(()),
        Some(exchange) => Err(SimulateError::Exchange {
            exchange: exchange as u32,
            problem: "is not sent once and received once",
        }),
    }
}

/// Checks the numbers of steps and blocks.
pub(super) fn check_sizes(steps: usize, blocks: usize) -> Result<(), PlanError> {
    check_range("steps", steps as u64, 0, STEPS_MAX as u64)?;
    check_range("blocks", blocks as u64, 0, BLOCKS_MAX as u64)
}

fn count_ends(
    world: &World,
    number: u32,
    rank: &SimulatedRank,
    ends: &mut [[u32; 2]],
) -> Result<(), SimulateError> {
    for step in &rank.steps {
        let sends = step.sends.iter().map(|exchange| (*exchange, true));
        for (exchange, sends) in sends.chain(step.receives.iter().map(|id| (*id, false))) {
            let Some(known) = world.exchanges.get(exchange as usize) else {
                return Err(SimulateError::Exchange { exchange, problem: "does not exist" });
            };
            if number != if sends { known.from } else { known.to } {
                return Err(SimulateError::Exchange {
                    exchange,
                    problem: "belongs to another rank",
                });
            }
            let count = &mut ends[exchange as usize][usize::from(!sends)];
            *count = count.saturating_add(1);
        }
    }
    Ok(())
}

/// Checks that every block is allocated once, used only while it exists, and fits the tiers it visits.
fn check_blocks(number: usize, rank: &SimulatedRank) -> Result<(), SimulateError> {
    #[derive(Clone, Copy, PartialEq)]
    enum Life {
        Before,
        There,
        Gone,
    }
    let rates = link_rates(&rank.machine);
    let mut lives = vec![Life::Before; rank.block_bytes.len()];
    for (index, step) in rank.steps.iter().enumerate() {
        let fault = |block: u32, problem| {
            Err(SimulateError::Block { rank: number, step: index, block, problem })
        };
        let uses = step.wakes.iter().map(|block| (block, "is woken but does not exist"));
        let needs = step.needs.iter().map(|block| (block, "is needed but does not exist"));
        for (&block, problem) in uses.chain(needs) {
            if lives.get(block as usize) != Some(&Life::There) {
                return fault(block, problem);
            }
        }
        for &block in &step.allocates {
            match lives.get_mut(block as usize) {
                Some(life) if *life == Life::Before => *life = Life::There,
                Some(_) => return fault(block, "is allocated twice"),
                None => return fault(block, "has no size"),
            }
            check_room(number, rank, block, Tier::Device)?;
        }
        for &block in &step.frees {
            match lives.get_mut(block as usize) {
                Some(life) if *life == Life::There => *life = Life::Gone,
                _ => return fault(block, "is freed but does not exist"),
            }
        }
        for sleep in &step.sleeps {
            if lives.get(sleep.block as usize) != Some(&Life::There) {
                return fault(sleep.block, "falls asleep but does not exist");
            }
            let links: &[LinkDirection] = match sleep.tier {
                Tier::Device => continue,
                Tier::Host => &[LinkDirection::Sleep, LinkDirection::Wake],
                Tier::Nvme => &LinkDirection::ALL,
            };
            check_room(number, rank, sleep.block, Tier::Host)?;
            if let Some(&link) = links.iter().find(|link| rates.of(**link) == 0) {
                return Err(SimulateError::Rate { rank: number, link });
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
    match capacity_bytes(&rank.machine, tier) {
        Some(most) if seen > most => {
            Err(SimulateError::TooLarge { rank: number, block, seen, tier, most })
        }
        _ => Ok(()),
    }
}
