//! Rollouts like those of τ²-bench, equal on every machine: one long shared system prompt, many tasks,
//! and conversations that branch off earlier ones of their task at any turn.

/// Tokens of the system prompt.
const SYSTEM: usize = 4_800;
/// Tokens of a task's opening.
const OPENING: usize = 150;
/// Most tokens of a sequence.
const CONTEXT: usize = 16_384;
/// Tokens of one turn: this many, and up to `TURN_MORE` more.
const TURN_LEAST: usize = 40;
const TURN_MORE: usize = 320;
/// Most turns that a rollout has of its own.
const TURNS: usize = 7;
/// Rollouts of one task.
const ROLLOUTS: usize = 64;
/// One rollout in this many ends with a turn of another: a complete prefix.
const PREFIXES: usize = 16;
pub(crate) const VOCAB: u32 = 151_936;

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Nearly uniform for `count` far below 2^64.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

/// Ids one sequence after another, and the offsets of sequences. Rollouts of a task do not follow
/// each other: tasks take turns, as they finish.
pub(crate) fn rollouts<I>(count: usize) -> (Vec<I>, Vec<u64>)
where
    I: Copy + TryFrom<u32>,
{
    let mut random = Random(1);
    let mut ids: Vec<I> = Vec::new();
    let mut offsets = vec![0];
    let extend = |ids: &mut Vec<I>, random: &mut Random, tokens: usize| {
        ids.extend(
            (0..tokens).filter_map(|_| I::try_from(random.below(VOCAB as usize) as u32).ok()),
        );
    };
    let tasks = count.div_ceil(ROLLOUTS);
    for index in 0..count {
        let begin = ids.len();
        if index < tasks {
            // A task's first: the system prompt is the first task's, the rest its own.
            if index == 0 {
                extend(&mut ids, &mut random, SYSTEM);
            } else {
                ids.extend_from_within(..SYSTEM);
            }
            extend(&mut ids, &mut random, OPENING);
        } else {
            let earlier = index % tasks + tasks * random.below(index / tasks);
            let (from, to) = (offsets[earlier] as usize, offsets[earlier + 1] as usize);
            let own = to - from - SYSTEM - OPENING;
            // Rollouts differ in late turns.
            let kept = random.below(own + 1).max(random.below(own + 1));
            ids.extend_from_within(from..from + SYSTEM + OPENING + kept);
        }
        if index < tasks || random.below(PREFIXES) > 0 {
            for _ in 0..=random.below(TURNS) {
                let room = CONTEXT - (ids.len() - begin);
                let tokens = TURN_LEAST + random.below(TURN_MORE);
                extend(&mut ids, &mut random, tokens.min(room));
            }
        }
        offsets.push(ids.len() as u64);
    }
    (ids, offsets)
}
