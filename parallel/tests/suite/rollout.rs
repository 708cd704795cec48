//! Compares tiers with every split and groups with every cut, checks migrations, and simulates two steps
//! worker by worker.

use std::collections::BTreeSet;

use dormouse_parallel::rollout::{
    Assignment, Curve, Destination, GroupCut, History, LengthPredictor, Migration,
    MigrationOptions, Progress, PromptHistory, Rollout, RolloutError, RolloutReport,
    RolloutRequest, StepOptions, migrate, tier_sizes,
};
use proptest::prelude::*;

pub(crate) fn curve() -> Curve {
    let tokens_per_s = vec![100.0, 350.0, 1000.0, 2200.0, 3000.0];
    Curve { batches: vec![1, 4, 16, 64, 256], tokens_per_s }
}

/// Seconds to decode some lengths, token by token.
fn token_by_token(curve: &Curve, lengths: &[u64]) -> f64 {
    let longest = lengths.iter().max().copied().unwrap_or(0);
    let alive = |token: u64| lengths.iter().filter(|length| **length > token).count() as u64;
    (0..longest).map(|token| curve.token_s(alive(token))).sum()
}

fn history(lengths: &[u64]) -> History {
    let one = |(prompt, length): (u64, &u64)| PromptHistory { prompt, steps: vec![vec![*length]] };
    History { prompts: (0..).zip(lengths).map(one).collect() }
}

fn requests(prompts: usize, responses: u32) -> Vec<RolloutRequest> {
    (0..prompts as u64)
        .map(|prompt| RolloutRequest { prompt, prompt_tokens: 50, responses, begun_tokens: 0 })
        .collect()
}

fn options(step: u64, workers: u32, groups: u32) -> StepOptions {
    StepOptions {
        step,
        workers,
        groups: Some(groups),
        slope_permille: Some(0),
        ..StepOptions::default()
    }
}

fn assign(lengths: &[u64], responses: u32, options: &StepOptions) -> Assignment {
    let requests = requests(lengths.len(), responses);
    Assignment::of(&history(lengths), &requests, &LengthPredictor::default(), options).unwrap()
}

/// All splits of a number into `parts` parts of at least one.
fn splits(whole: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 1 {
        return vec![vec![whole]];
    }
    (1..=whole + 1 - parts)
        .flat_map(|first| {
            splits(whole - first, parts - 1).into_iter().map(move |mut rest| {
                rest.insert(0, first);
                rest
            })
        })
        .collect()
}

proptest! {
    #[test]
    fn every_prompt_has_one_worker_of_its_groups_tier(
        lengths in prop::collection::vec(1u64..500, 1..40),
        step in 0u64..5, share in 0.0..1.0f64, each in 1u32..4, work: bool, tiers: bool,
        responses in 1u32..5,
    ) {
        let groups = 1 + (share * (lengths.len() as f64 - 1.0) / f64::from(each)) as u32;
        let workers = (groups * each).min(lengths.len() as u32);
        let groups = if workers.is_multiple_of(groups) { groups } else { workers };
        let cut = if work { GroupCut::EqualWork } else { GroupCut::EqualCount };
        let curve = tiers.then(curve);
        let options = StepOptions { cut, curve, ..options(step, workers, groups) };
        let step = assign(&lengths, responses, &options);
        prop_assert_eq!(&step, &assign(&lengths, responses, &options), "deterministic");

        let mut seen = BTreeSet::new();
        let (mut before, mut tiers) = (0, BTreeSet::new());
        for (number, group) in step.groups.iter().enumerate() {
            let predicted = |request: &u32| lengths[*request as usize];
            prop_assert!(!group.requests.is_empty());
            prop_assert!(group.requests.iter().all(|request| predicted(request) >= before), "ascending");
            before = predicted(group.requests.last().unwrap());
            prop_assert_eq!(group.longest_tokens, before);
            let sum: u64 = group.requests.iter().map(|request| predicted(request) * u64::from(responses)).sum();
            prop_assert_eq!(group.predicted_tokens, sum);
            let mut prompts = vec![0; workers as usize];
            for request in &group.requests {
                prop_assert!(seen.insert(*request), "once");
                let placed = step.placed[*request as usize];
                prop_assert_eq!(placed.group as usize, number);
                prop_assert_eq!(placed.predicted_tokens, predicted(request));
                let tier = group.workers.begin..group.workers.end;
                prop_assert!(tier.contains(&placed.worker.into()));
                prompts[placed.worker as usize] += 1;
            }
            let share = group.requests.len().div_ceil(group.workers.count() as usize);
            prop_assert!(prompts.iter().all(|prompts| *prompts <= share));
            for worker in group.workers.begin..group.workers.end {
                prop_assert!(tiers.insert(worker), "tiers do not overlap");
            }
        }
        prop_assert_eq!(seen.len(), lengths.len());
        prop_assert_eq!(tiers.len(), workers as usize);
        let begins: Vec<u64> = step.groups.iter().map(|group| group.workers.begin).collect();
        let odd = options.step % 2 == 1;
        let mirrored = begins.iter().rev().is_sorted();
        prop_assert!((odd && begins.is_sorted()) || (!odd && mirrored));
        let time = |worker: u64| {
            let own = step.placed.iter().filter(|one| u64::from(one.worker) == worker);
            let own: Vec<u64> = own.flat_map(|one| vec![one.predicted_tokens; responses as usize]).collect();
            let longest = own.iter().max().map_or(0.0, |tokens| *tokens as f64);
            let time = options.curve.as_ref().map_or(longest, |curve| token_by_token(curve, &own));
            (time, own.iter().sum::<u64>())
        };
        for group in &step.groups {
            let mut times: Vec<_> = (group.workers.begin..group.workers.end).map(time).collect();
            if !odd {
                times.reverse();
            }
            // Times of a curve that are equal in exact arithmetic differ by rounding, in either order.
            let ascend = |one: &(f64, u64), other: &(f64, u64)| match &options.curve {
                Some(_) => one.0 <= other.0 + 1e-9,
                None => one <= other,
            };
            prop_assert!(times.is_sorted_by(ascend), "a tier's workers ascend by predicted time: {times:?}");
        }
        if cut == GroupCut::EqualCount {
            let counts = || step.groups.iter().map(|group| group.requests.len());
            prop_assert!(counts().max().unwrap() - counts().min().unwrap() <= 1);
        }
    }

    #[test]
    fn equal_work_is_the_evenest_cut(
        mut lengths in prop::collection::vec(1u64..60, 1..10), groups in 1usize..5,
    ) {
        let groups = groups.min(lengths.len());
        let cut = GroupCut::EqualWork;
        let step = assign(&lengths, 1, &StepOptions { cut, ..options(1, groups as u32, groups as u32) });
        let most = step.groups.iter().map(|group| group.predicted_tokens).max().unwrap();
        lengths.sort_unstable();
        let largest = |split: &Vec<usize>| {
            let mut rest = &lengths[..];
            let sums = split.iter().map(|count| {
                let (head, tail) = rest.split_at(*count);
                rest = tail;
                head.iter().sum::<u64>()
            });
            sums.max().unwrap()
        };
        prop_assert_eq!(most, splits(lengths.len(), groups).iter().map(largest).min().unwrap());
    }

    /// No other split of the workers has a smaller maximum weighted time.
    #[test]
    fn tier_sizes_are_the_best_split(
        groups in prop::collection::vec(
            prop::collection::vec((1u64..40, 1u32..4), 1..7), 1..5),
        spare in 0.0..1.0f64, slope in prop_oneof![Just(0u32), 1u32..3000],
    ) {
        let prompts: usize = groups.iter().map(Vec::len).sum();
        let workers = groups.len() + (spare * (prompts.min(8).max(groups.len()) - groups.len()) as f64) as usize;
        let sizes = tier_sizes(&curve(), &groups, workers as u32, slope).unwrap();
        let sizes: Vec<usize> = sizes.into_iter().map(|size| size as usize).collect();
        prop_assert_eq!(sizes.iter().sum::<usize>(), workers, "all workers are used");
        // The time of a tier by definition: its longest prompts on one worker.
        let latest = |split: &Vec<usize>| {
            let time = |number: usize| {
                let mut longest = groups[number].clone();
                longest.sort_unstable();
                longest.reverse();
                longest.truncate(longest.len().div_ceil(split[number]));
                let each = |(tokens, responses): &(u64, u32)| vec![*tokens; *responses as usize];
                let lengths: Vec<u64> = longest.iter().flat_map(each).collect();
                let place = number as f64 / (groups.len().max(2) - 1) as f64;
                token_by_token(&curve(), &lengths) / (1.0 + f64::from(slope) / 1000.0 * place)
            };
            (0..groups.len()).map(time).fold(0.0, f64::max)
        };
        let fits = |split: &&Vec<usize>| {
            split.iter().zip(&groups).all(|(size, group)| *size <= group.len())
        };
        let all = splits(workers, groups.len());
        let best = all.iter().filter(fits).map(latest).fold(f64::INFINITY, f64::min);
        prop_assert!(fits(&&sizes));
        prop_assert!(latest(&sizes) <= best * (1.0 + 1e-12), "{} {}", latest(&sizes), best);
    }

    #[test]
    fn decoding_takes_what_it_takes_token_by_token(
        lengths in prop::collection::vec((0u64..60, 1u32..9), 0..20),
    ) {
        let mut sorted = lengths.clone();
        sorted.sort_unstable();
        sorted.reverse();
        let each = |(tokens, sequences): &(u64, u32)| vec![*tokens; *sequences as usize];
        let all: Vec<u64> = lengths.iter().flat_map(each).collect();
        let wanted = token_by_token(&curve(), &all);
        prop_assert!((curve().decode_s(&sorted) - wanted).abs() <= 1e-9 * wanted.max(1.0));
    }

    /// Migrations are of grown rollouts in tails, lose and double nothing, and are predicted to gain: the time
    /// of all workers falls, in which a later end of the step counts for each. What follows from them is
    /// accepted as progress again.
    #[test]
    fn migrations_lose_nothing_and_gain(
        lengths in prop::collection::vec(1u64..100, 4..16),
        grown in prop::collection::vec((0u64..150, prop::bool::weighted(0.75)), 48),
        tail in prop_oneof![1 => Just(0u32), 9 => 0u32..1001], growth in 1000u32..3000, batch_max in 0u32..9,
        measured: bool, recompute_permille in 0u32..300, late_permille in 0u32..4000, next_step: bool,
        earlier in prop::option::of(1u64..400),
    ) {
        let workers = 4;
        let step = assign(&lengths, 3, &options(1, workers, 2));
        let requests = requests(lengths.len(), 3);
        let limits = MigrationOptions {
            tail_permille: tail, growth_permille: growth, batch_max, recompute_permille,
            late_permille, next_step, curve: measured.then(curve), ..MigrationOptions::default()
        };
        // Responses that all took as long leave no doubt about what is left.
        let past = history(&vec![earlier.unwrap_or(0); if earlier.is_some() { 8 } else { 0 }]);
        let mut rollouts = Vec::new();
        for request in 0..lengths.len() as u32 {
            for response in 0..3 {
                let (tokens, finished) = grown[(request * 3 + response) as usize];
                let worker = step.placed[request as usize].worker;
                rollouts.push(Rollout { request, response, worker, tokens, finished });
            }
        }
        let all = rollouts.len();
        let mut progress = Progress { rollouts, ..Progress::default() };
        for _ in 0..3 {
            let moves = migrate(&step, &requests, &past, &progress, &limits).unwrap();
            let after = progress.after(&moves).unwrap();
            prop_assert!(moves.is_empty() || progress.after(&[&moves[..], &moves[..1]].concat()).is_err());
            gain(&step, &lengths, earlier, &limits, &progress, &moves, &after)?;
            prop_assert_eq!(after.rollouts.len() + after.deferred.len(), all);
            let report = RolloutReport::of(&step, &after, None, 100).unwrap();
            let tokens: u64 = progress.rollouts.iter().chain(&progress.deferred).map(|one| one.tokens).sum();
            prop_assert_eq!(report.workers.iter().map(|one| one.actual_tokens).sum::<u64>(), tokens);
            progress = after;
            for one in progress.rollouts.iter_mut().filter(|one| !one.finished) {
                one.tokens += 20;
            }
        }
    }
}

/// Checks the migrations of one call against what they are predicted to change.
fn gain(
    step: &Assignment,
    lengths: &[u64],
    earlier: Option<u64>,
    limits: &MigrationOptions,
    progress: &Progress,
    moves: &[Migration],
    after: &Progress,
) -> Result<(), TestCaseError> {
    let on = |worker: u32| progress.rollouts.iter().filter(move |one| one.worker == worker);
    let in_tail = |worker: u32| {
        let left = on(worker).filter(|one| !one.finished).count() as u64;
        let share = left * 1000 <= on(worker).count() as u64 * u64::from(limits.tail_permille);
        share || left == 1 && limits.tail_permille > 0
    };
    let token = if limits.curve.is_some() { 0.01 } else { 1.0 };
    let recompute = |one: &Migration| {
        one.recompute_tokens as f64 * f64::from(limits.recompute_permille) / 1000.0 * token
    };
    let remaining = |one: &Rollout| {
        let (predicted, growth) =
            (lengths[one.request as usize], u64::from(limits.growth_permille));
        let grows = one.tokens * (growth - 1000) / 1000;
        let predicted = predicted.saturating_sub(one.tokens);
        let left = match earlier {
            Some(length) if length > one.tokens => length - one.tokens,
            None if predicted == 0 => grows,
            _ => predicted,
        };
        left.max(1)
    };
    let end = |progress: &Progress, worker: u32| {
        let mine = progress.rollouts.iter().filter(|one| one.worker == worker && !one.finished);
        let left: Vec<u64> = mine.map(remaining).collect();
        match &limits.curve {
            Some(curve) => token_by_token(curve, &left),
            None => left.iter().max().copied().unwrap_or(0) as f64,
        }
    };
    let before: Vec<f64> = (0..step.workers).map(|worker| end(progress, worker)).collect();
    let mut ends: Vec<f64> = (0..step.workers).map(|worker| end(after, worker)).collect();
    let (mut deferred, mut touched) = (0.0, BTreeSet::new());
    for one in moves {
        let rollout =
            on(one.from).find(|it| (it.request, it.response) == (one.request, one.response));
        let rollout = rollout.unwrap();
        prop_assert!(!rollout.finished && in_tail(one.from));
        let limit = lengths[one.request as usize] * u64::from(limits.growth_permille);
        prop_assert!(one.tokens * 1000 > limit);
        prop_assert_eq!(one.recompute_tokens, 50 + one.tokens);
        touched.insert(one.from);
        match one.to {
            Destination::Worker(to) => {
                ends[to as usize] += recompute(one);
                prop_assert!(on(to).any(|one| !one.finished), "its step has not ended");
                let mine = after.rollouts.iter().filter(|it| it.worker == to && !it.finished);
                prop_assert!(mine.count() <= limits.batch_max as usize);
            }
            Destination::NextStep => deferred += recompute(one),
        }
    }
    for one in moves {
        if let Destination::Worker(to) = one.to {
            prop_assert!(!touched.contains(&to), "no worker receives and migrates");
        }
    }
    let sum = |ends: &[f64]| ends.iter().sum::<f64>();
    let last = |ends: &[f64]| ends.iter().copied().fold(0.0, f64::max);
    let late = f64::from(limits.late_permille) / 1000.0 * f64::from(step.workers);
    let time = |ends: &[f64]| sum(ends) + late * last(ends);
    prop_assert!(limits.next_step || after.deferred.len() == progress.deferred.len());
    prop_assert!(moves.is_empty() || time(&ends) + deferred < time(&before), "{ends:?} {before:?}");
    Ok(())
}

/// A number from two, the same in every run.
fn noise(seed: u64, at: u64) -> f64 {
    let mut x =
        (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ at.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ (x >> 29)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Idle share of the workers over two steps; a worker begins the second when it ends the first.
fn idle(steps: [&Assignment; 2], lengths: [&[u64]; 2]) -> f64 {
    let mut ends = vec![0.0; steps[0].workers as usize];
    for (step, lengths) in steps.into_iter().zip(lengths) {
        let mut on: Vec<Vec<u64>> = vec![Vec::new(); ends.len()];
        for (placed, length) in step.placed.iter().zip(lengths) {
            on[placed.worker as usize].push(*length);
        }
        for (end, lengths) in ends.iter_mut().zip(on) {
            *end += token_by_token(&curve(), &lengths);
        }
    }
    let last = ends.iter().copied().fold(0.0, f64::max);
    1.0 - ends.iter().sum::<f64>() / (last * ends.len() as f64)
}

/// Lengths spread over a factor of about 50, and 10 % away from their history.
#[test]
fn alternating_order_reduces_idle_time() {
    let mut idles = [0.0; 2];
    for seed in 0..24 {
        let length = |at: u64| (2.0 + 4.0 * noise(seed, at)).exp() as u64 + 1;
        let lengths: Vec<u64> = (0..64).map(length).collect();
        let actual = |step: u64| -> Vec<u64> {
            let drawn = |(at, length): (u64, &u64)| {
                (*length as f64 * (0.9 + 0.2 * noise(seed, step * 1000 + at))) as u64 + 1
            };
            (0..).zip(&lengths).map(drawn).collect()
        };
        for (groups, cut) in [(8, GroupCut::EqualCount), (4, GroupCut::EqualWork)] {
            let step = |step| assign(&lengths, 1, &StepOptions { cut, ..options(step, 8, groups) });
            let drawn = [&actual(1)[..], &actual(2)];
            let alternating = idle([&step(1), &step(2)], drawn);
            let constant = idle([&step(1), &step(3)], drawn);
            assert!(alternating < constant, "seed {seed}: {alternating} {constant}");
            idles[0] += alternating / 48.0;
            idles[1] += constant / 48.0;
        }
    }
    assert!(idles[0] < 0.6 * idles[1], "{idles:?}");
}

#[test]
fn sized_tiers_end_closer_together_than_equal_tiers() {
    let lengths: Vec<u64> = (0..64).map(|at| 20 + at * at / 2).collect();
    let time = |curve_given: Option<Curve>, slope_permille| {
        let options = StepOptions {
            curve: curve_given,
            slope_permille: Some(slope_permille),
            ..options(1, 16, 4)
        };
        let step = assign(&lengths, 8, &options);
        let times: Vec<f64> = (0..16)
            .map(|worker| {
                let mine = (0..64).filter(|at| step.placed[*at].worker == worker);
                let all: Vec<u64> = mine.flat_map(|at| [lengths[at]; 8]).collect();
                token_by_token(&curve(), &all)
            })
            .collect();
        let sizes: Vec<u64> = step.groups.iter().map(|group| group.workers.count()).collect();
        (times.into_iter().fold(0.0, f64::max), sizes)
    };
    let (equal, sizes) = time(None, 0);
    assert_eq!(sizes, [4; 4]);
    let (tiered, sizes) = time(Some(curve()), 0);
    assert!(sizes.is_sorted() && sizes[3] > sizes[0], "{sizes:?}");
    assert!(tiered < equal, "{tiered} {equal}");
    let (_, sloped) = time(Some(curve()), 4000);
    assert!(sloped[3] < sizes[3], "the longest group may take five times as long: {sloped:?}");
}

/// Time of two steps whose predictions are right, with the earliest worker taking the longest prompts.
fn two_steps(step: &Assignment, lengths: &[u64], responses: u32, measured: Option<&Curve>) -> f64 {
    let mut on: Vec<Vec<u64>> = vec![Vec::new(); step.workers as usize];
    for (placed, length) in step.placed.iter().zip(lengths) {
        on[placed.worker as usize].extend(vec![*length; responses as usize]);
    }
    let time = |lengths: &Vec<u64>| match measured {
        Some(curve) => token_by_token(curve, lengths),
        None => lengths.iter().max().copied().unwrap_or(0) as f64,
    };
    let second: Vec<f64> = on.iter().map(time).collect();
    let mut first = second.clone();
    first.sort_unstable_by(f64::total_cmp);
    first.iter().zip(second.iter().rev()).map(|(one, other)| one + other).fold(0.0, f64::max)
}

proptest! {
    /// Chosen groups and tiers never take longer than equal tiers, for any number of groups, on a history
    /// that repeats itself.
    #[test]
    fn what_is_chosen_is_never_worse_than_equal_tiers(
        lengths in prop::collection::vec(1u64..400, 8..40), responses in 1u32..6,
        measured: bool, given: bool, recorded in 1usize..4,
    ) {
        let repeated = |(prompt, length): (u64, &u64)| PromptHistory { prompt, steps: vec![vec![*length]; recorded] };
        let history = History { prompts: (0..).zip(&lengths).map(repeated).collect() };
        let (requests, curve) = (requests(lengths.len(), responses), measured.then(curve));
        let of = |groups, curve: Option<&Curve>| {
            let curve = curve.cloned();
            let options = StepOptions { step: 1, workers: 8, groups, curve, ..StepOptions::default() };
            let predictor = LengthPredictor::default();
            Assignment::of(&history, &requests, &predictor, &options).unwrap()
        };
        let chosen = of(given.then_some(4), curve.as_ref());
        let time = |step: &Assignment| two_steps(step, &lengths, responses, curve.as_ref());
        let equal: &[u32] = if given { &[4] } else { &[8, 4, 2, 1] };
        for groups in equal {
            let flat = of(Some(*groups), None);
            prop_assert!(time(&chosen) <= time(&flat) * (1.0 + 1e-9), "{} {}", time(&chosen), time(&flat));
        }
        let counts: Vec<usize> = chosen.groups.iter().map(|group| group.requests.len()).collect();
        if !measured {
            let busy = |worker: u32| chosen.placed.iter().any(|one| one.worker == worker);
            prop_assert!((0..8).all(busy), "no worker idles: {counts:?}");
            let (first, last) = counts.split_at(counts.len() / 2);
            let rises = first.iter().sum::<usize>() <= last.iter().sum();
            prop_assert!(rises, "numbers that fall are not safe: {counts:?}");
        }
        let mean = lengths.len() as f64 / counts.len() as f64;
        if given {
            prop_assert!(counts.iter().all(|count| (*count as f64 - mean).abs() < 1.0), "{counts:?}");
        } else {
            let far = |count: &usize| (*count as f64 - mean).abs() > 0.9 * mean + 1.0;
            prop_assert!(!counts.iter().any(far), "from a tenth of the mean to 1.9 times: {counts:?}");
        }
        if recorded == 1 {
            let sizes: Vec<u64> = chosen.groups.iter().map(|group| group.workers.count()).collect();
            prop_assert!(sizes.iter().all(|size| *size == sizes[0]), "no trial, no other tiers: {sizes:?}");
        }
    }
}

#[test]
fn a_given_slope_leaves_the_groups_to_choose_also_without_a_history() {
    let (requests, predictor) = (requests(8, 2), LengthPredictor::default());
    let curve = Some(curve());
    let slope_permille = Some(500);
    let options =
        StepOptions { step: 1, workers: 4, curve, slope_permille, ..StepOptions::default() };
    for steps in [vec![], vec![vec![30, 40]; 3]] {
        let one = |prompt| PromptHistory { prompt, steps: steps.clone() };
        let history = History { prompts: (0..8).map(one).collect() };
        let step = Assignment::of(&history, &requests, &predictor, &options).unwrap();
        assert_eq!(step.placed.len(), 8);
    }
}

/// Of 8 prompts in 5 groups, equal tiers of 7 workers would give one of two workers nothing.
#[test]
fn no_worker_idles_in_tiers_of_a_curve() {
    let options = StepOptions {
        step: 1,
        workers: 7,
        groups: Some(5),
        curve: Some(curve()),
        ..StepOptions::default()
    };
    let step = assign(&[100; 8], 1, &options);
    let workers: BTreeSet<u32> = step.placed.iter().map(|one| one.worker).collect();
    assert_eq!(workers.len(), 7);
}

/// Few prompts in one step and many in the next end sooner than as many in both.
#[test]
fn numbers_of_prompts_rise_where_that_ends_sooner() {
    let (requests, predictor) = (requests(128, 4), LengthPredictor::default());
    let gain = |seed| {
        let length = |at| 1 + (8000.0 * noise(seed, at)) as u64;
        let lengths: Vec<u64> = (0..128).map(length).collect();
        let one = |prompt| PromptHistory { prompt, steps: vec![vec![length(prompt); 4]; 3] };
        let history = History { prompts: (0..128).map(one).collect() };
        let time = |groups| {
            let options = StepOptions { step: 1, workers: 16, groups, ..StepOptions::default() };
            let step = Assignment::of(&history, &requests, &predictor, &options).unwrap();
            two_steps(&step, &lengths, 4, None)
        };
        let level = [16, 8, 4, 2, 1].map(|groups| time(Some(groups)));
        level.into_iter().fold(f64::INFINITY, f64::min) / time(None)
    };
    let gain = (0..8).map(gain).sum::<f64>() / 8.0;
    // Of uniform lengths and many prompts, 16 equal groups and their mirror images end at 17/16 of the longest, those that rise by
    // 0.9 at 1.01.
    assert!(gain > 1.05, "over the best of as many prompts: {gain}");
}

/// If every worker has one of the longest responses in both steps, numbers that rise end no sooner, but more workers do. If all are as
/// long, none does, and all have as many prompts.
#[test]
fn of_equal_ends_the_one_is_chosen_whose_workers_end_sooner_in_sum() {
    let (requests, predictor) = (requests(128, 4), LengthPredictor::default());
    let counts = |length: fn(u64, u64) -> u64| {
        let of_step = |prompt, step| (0..4).map(|at| length(step, 4 * prompt + at)).collect();
        let steps = |prompt| (1..4).map(|step| of_step(prompt, step)).collect();
        let one = |prompt| PromptHistory { prompt, steps: steps(prompt) };
        let history = History { prompts: (0..128).map(one).collect() };
        let options = StepOptions { step: 1, workers: 16, ..StepOptions::default() };
        let step = Assignment::of(&history, &requests, &predictor, &options).unwrap();
        step.groups.iter().map(|group| group.requests.len()).collect::<Vec<usize>>()
    };
    let some = counts(|step, at| if noise(step, at) < 0.15 { 1000 } else { 10 });
    assert!(some.iter().max() > some.iter().min(), "{some:?}");
    let all = counts(|_, _| 1000);
    assert_eq!(all, [8; 16]);
}

/// With a history that says nothing about the next lengths, tiers by slope 0 would crowd the prompts that it
/// calls short; with one that repeats itself, other tiers than equal ones gain.
#[test]
fn tiers_are_chosen_by_what_the_history_is_worth() {
    let long = |seed, at| {
        if noise(seed, at) < 0.2 { 3000 } else { 100 + (200.0 * noise(seed, at)) as u64 }
    };
    let (requests, predictor) = (requests(64, 4), LengthPredictor::default());
    let time = |worth: bool, slope_permille| {
        (0..16)
            .map(|seed| {
                let actual: Vec<u64> = (0..64).map(|at| long(seed, at)).collect();
                let recorded =
                    |step: u64, at| long(if worth { seed } else { seed + 100 * step }, at);
                let steps = |prompt| (1..4).map(|step| vec![recorded(step, prompt); 4]).collect();
                let one = |prompt| PromptHistory { prompt, steps: steps(prompt) };
                let history = History { prompts: (0..64).map(one).collect() };
                let curve = Some(curve());
                let options = StepOptions {
                    step: 1,
                    workers: 8,
                    groups: Some(4),
                    curve,
                    slope_permille,
                    ..StepOptions::default()
                };
                let step = Assignment::of(&history, &requests, &predictor, &options).unwrap();
                let flat = StepOptions { curve: None, ..options };
                let flat = Assignment::of(&history, &requests, &predictor, &flat).unwrap();
                let time = |step| two_steps(step, &actual, 4, Some(&self::curve()));
                time(&flat) / time(&step)
            })
            .sum::<f64>()
            / 16.0
    };
    let (chosen, zero) = (time(false, None), time(false, Some(0)));
    assert!(chosen > 0.98 && chosen > zero + 0.1, "of a useless history: {chosen}, slope 0 {zero}");
    let (chosen, zero) = (time(true, None), time(true, Some(0)));
    assert!(chosen > 1.02 && chosen > zero, "of a true history: {chosen}, slope 0 {zero}");
}

/// One long prompt sets the time; remaining workers go to the slowest tier that can grow.
#[test]
fn remaining_workers_go_to_the_slowest_tier() {
    let groups = vec![vec![(100, 1)], vec![(20, 1); 4], vec![(10, 1); 4]];
    assert_eq!(tier_sizes(&curve(), &groups, 5, 0).unwrap(), [1, 3, 1]);
}

#[test]
fn a_prediction_is_a_quantile_of_the_last_steps() {
    let steps = vec![vec![1000; 9], vec![10, 12, 900], vec![], vec![11, 13]];
    let known = |prompt| PromptHistory { prompt, steps: steps.clone() };
    let other = PromptHistory { prompt: 8, steps: vec![vec![40]] };
    let history = History { prompts: vec![known(7), other] };
    let request = |prompt, begun_tokens| RolloutRequest {
        prompt,
        begun_tokens,
        responses: 1,
        prompt_tokens: 1,
    };
    let asked = [request(7, 0), request(8, 0), request(9, 0), request(7, 99)];
    let of = |last_steps, quantile_permille| {
        let predictor = LengthPredictor { last_steps, quantile_permille, unknown_tokens: 5 };
        let all = predictor.predict(&history, &asked).unwrap();
        assert_eq!(all.iter().map(|one| one.known).collect::<Vec<_>>(), [true, true, false, true]);
        all.iter().map(|one| one.tokens).collect::<Vec<_>>()
    };
    // The outlier does not move the median of 10 11 12 13 900; a new prompt has the median of the known ones.
    assert_eq!(of(3, 500), [12, 40, 12, 99]);
    assert_eq!(of(3, 1000), [900, 40, 900, 900]);
    assert_eq!(of(1, 500), [11, 40, 11, 99]);
    assert_eq!(of(9, 900), [1000, 40, 1000, 1000]);
    let predictor = LengthPredictor { unknown_tokens: 5, ..LengthPredictor::default() };
    let alone = predictor.predict(&History::default(), &[request(1, 0)]).unwrap();
    assert_eq!((alone[0].tokens, alone[0].known), (5, false));
}

#[test]
fn speeds_are_linear_between_measured_points() {
    let curve = curve();
    assert_eq!([curve.token_s(0), curve.token_s(1)], [0.01, 0.01]);
    assert!((curve.token_s(10) - 10.0 / 675.0).abs() < 1e-15, "half way from 350 to 1000");
    assert_eq!(curve.token_s(512), 512.0 / 3000.0);
}

fn whole(step: &Assignment, lengths: &[u64], responses: u32) -> Progress {
    let one = |request: u32, response: u32| {
        let (worker, tokens) = (step.placed[request as usize].worker, lengths[request as usize]);
        Rollout { request, response, worker, tokens, finished: true }
    };
    let all = (0..lengths.len() as u32)
        .flat_map(|request| (0..responses).map(move |at| one(request, at)));
    Progress { rollouts: all.collect(), ..Progress::default() }
}

#[test]
fn a_report_compares_predicted_and_actual_lengths() {
    let lengths = [10, 20, 30, 40];
    let step = assign(&lengths, 2, &options(1, 2, 2));
    let exact = RolloutReport::of(&step, &whole(&step, &lengths, 2), None, 100).unwrap();
    assert_eq!(exact.workers[0].predicted_tokens, 60);
    assert_eq!(exact.workers[1].actual_tokens, 140);
    assert_eq!(exact.predicted_imbalance, exact.actual_imbalance);
    assert!((exact.actual_imbalance - 1.4).abs() < 1e-12);
    assert_eq!([exact.workers[0].idle_share, exact.workers[1].idle_share], [0.5, 0.0]);
    assert_eq!(exact.idle_share, 0.25);
    assert_eq!(exact.rank_shift.mean + exact.rank_shift.most + exact.rank_shift.strong_share, 0.0);

    let turned = [40, 30, 20, 10];
    let curve = curve();
    let report = RolloutReport::of(&step, &whole(&step, &turned, 2), Some(&curve), 400).unwrap();
    assert_eq!((report.rank_shift.most, report.rank_shift.strong_share), (1.0, 0.5));
    assert!((report.rank_shift.mean - 2.0 / 3.0).abs() < 1e-12);
    let seconds = |lengths: &[u64]| token_by_token(&curve, lengths);
    let (first, second) = (seconds(&[40, 40, 30, 30]), seconds(&[20, 20, 10, 10]));
    assert!((report.workers[0].actual_s - first).abs() < 1e-12);
    assert!((report.workers[0].predicted_s - seconds(&[10, 10, 20, 20])).abs() < 1e-12);
    assert!((report.workers[1].idle_share - (1.0 - second / first)).abs() < 1e-12);
}

#[test]
fn refuses_invalid_rollout_input() {
    let lengths = [10, 20, 30, 40];
    let of = |history: &History, requests: &[RolloutRequest], options: &StepOptions| {
        Assignment::of(history, requests, &LengthPredictor::default(), options).unwrap_err()
    };
    let (asked, past) = (requests(4, 1), history(&lengths));
    let mut twice = past.clone();
    twice.prompts.push(twice.prompts[2].clone());
    assert_eq!(of(&twice, &asked, &options(1, 2, 2)), RolloutError::Twice { prompt: 2 });
    let tiers = of(&past, &asked, &options(1, 3, 2));
    assert_eq!(tiers, RolloutError::Tiers { workers: 3, groups: 2 });
    let text = |options: StepOptions| of(&past, &asked, &options).to_string();
    assert_eq!(text(options(1, 5, 1)), "workers is 5; accepted: 1 to 4");
    assert_eq!(text(options(1, 2, 3)), "groups is 3; accepted: 1 to 2");
    assert_eq!(text(options(1, 0, 0)), "workers is 0; accepted: 1 to 4");
    assert!(of(&past, &[], &options(1, 1, 1)).to_string().starts_with("prompts is 0"));
    assert!(
        of(&past, &requests(4, 0), &options(1, 1, 1)).to_string().starts_with("responses of a")
    );
    for (batches, tokens_per_s, index) in [
        (vec![0], vec![1.0], 0),
        (vec![2, 2], vec![1.0, 1.0], 1),
        (vec![1, 2], vec![1.0, 2.5], 1),
        (vec![1], vec![f64::NAN], 0),
        (vec![1], vec![0.0], 0),
    ] {
        let curve = Some(Curve { batches, tokens_per_s });
        let error = of(&past, &asked, &StepOptions { curve, ..options(1, 2, 2) });
        assert!(
            matches!(error, RolloutError::Curve { index: seen, .. } if seen == index),
            "{error}"
        );
    }
    let step = assign(&lengths, 2, &options(1, 2, 2));
    let good = whole(&step, &lengths, 2);
    let report = |change: &dyn Fn(&mut Vec<Rollout>)| {
        let mut progress = good.clone();
        change(&mut progress.rollouts);
        RolloutReport::of(&step, &progress, None, 100).unwrap_err().to_string()
    };
    assert!(report(&|all| all[1].response = 0).starts_with("rollout 1 is response 0 of request 0"));
    assert!(report(&|all| all[7].worker = 2).contains("on worker 2; accepted: each response"));
    assert!(report(&|all| all[7].request = 4).contains("of request 4"));
    assert!(report(&|all| all.truncate(7)).starts_with("rollouts is 7; accepted: 8 to 8"));
    let mut broken = step.clone();
    broken.placed[0].worker = 2;
    let error = RolloutReport::of(&broken, &good, None, 100).unwrap_err();
    assert!(error.to_string().starts_with("worker of a prompt is 2; accepted: 0 to 1"));
    assert!(RolloutReport::of(&step, &good, None, 1001).is_err());
    let one = Migration {
        request: 0,
        response: 0,
        from: 0,
        to: Destination::NextStep,
        tokens: 10,
        recompute_tokens: 60,
    };
    let mut running = good.clone();
    running.rollouts[0].finished = false;
    assert_eq!(running.after(&[one]).unwrap().deferred, [running.rollouts[0]]);
    let refused =
        |progress: &Progress, moves: &[Migration]| progress.after(moves).unwrap_err().to_string();
    assert!(
        refused(&good, &[one])
            .starts_with("migration 0 is of response 0 of request 0; accepted: an")
    );
    assert!(refused(&running, &[one, one]).starts_with("migration 1"));
    assert!(refused(&running, &[Migration { from: 1, ..one }]).starts_with("migration 0"));
    assert!(refused(&running, &[Migration { request: 9, ..one }]).contains("of request 9"));
    let limits = MigrationOptions { growth_permille: 999, ..MigrationOptions::default() };
    assert!(migrate(&step, &requests(4, 2), &past, &good, &limits).is_err());
    assert!(migrate(&step, &requests(3, 2), &past, &good, &MigrationOptions::default()).is_err());
}

/// Trials predict each of the last steps from the others, so they read one step more than a prediction.
#[test]
fn lengths_that_trials_read_are_checked() {
    let assign = |steps: &[u64]| {
        let steps: Vec<Vec<u64>> = steps.iter().map(|tokens| vec![*tokens]).collect();
        let one = |prompt| PromptHistory { prompt, steps: steps.clone() };
        let history = History { prompts: (0..4).map(one).collect() };
        let options = StepOptions { groups: None, slope_permille: None, ..options(1, 4, 4) };
        let predictor = LengthPredictor { quantile_permille: 1000, ..LengthPredictor::default() };
        assert_eq!(predictor.last_steps, 3);
        Assignment::of(&history, &requests(4, 2), &predictor, &options)
    };
    let refused = assign(&[u64::MAX, 10, 20, 30]).unwrap_err().to_string();
    assert_eq!(
        refused,
        "tokens of an earlier response is 18446744073709551615; accepted: 0 to 268435456"
    );
    assert_eq!(assign(&[u64::MAX, 40, 10, 20, 30]), assign(&[40, 10, 20, 30]), "not read");
}

/// Moves of two rollouts of 160 tokens, predicted 100, each alone on a worker.
fn moves_of_two(steps: Vec<Vec<Vec<u64>>>, options: &MigrationOptions) -> usize {
    let step = assign(&[100, 100], 1, &self::options(1, 2, 2));
    let prompts = (0..).zip(steps).map(|(prompt, steps)| PromptHistory { prompt, steps });
    let past = History { prompts: prompts.collect() };
    let rollout = |request: u32| Rollout {
        request,
        response: 0,
        worker: step.placed[request as usize].worker,
        tokens: 160,
        finished: false,
    };
    let progress = Progress { rollouts: vec![rollout(0), rollout(1)], ..Progress::default() };
    migrate(&step, &requests(2, 1), &past, &progress, options).unwrap().len()
}

#[test]
fn a_rollout_goes_on_as_those_with_near_predictions_did() {
    // Of prompts predicted 100 some took 180, so 20 are left, which 21 of recomputation do not pay for.
    let options = MigrationOptions { recompute_permille: 100, ..MigrationOptions::default() };
    let near = |length: u64| vec![vec![100], vec![length], vec![100]];
    let mut steps: Vec<_> =
        (0..200).map(|prompt| near(if prompt < 70 { 180 } else { 100 })).collect();
    assert_eq!(moves_of_two(steps.clone(), &options), 0);
    steps.extend(vec![vec![vec![5000]; 3]; 200]);
    assert_eq!(moves_of_two(steps, &options), 0, "others, predicted 5000, do not count");
    assert_eq!(moves_of_two(vec![vec![vec![5000]; 3]; 70], &options), 1);
}

/// 20 workers that end late have as many rollouts as they may; one that ends sooner has room.
#[test]
fn a_full_worker_is_no_destination_and_hides_none() {
    let lengths: Vec<u64> = (0..22).map(|worker| 100 + worker).collect();
    let step = assign(&lengths, 2, &options(1, 22, 22));
    let mut progress = whole(&step, &lengths, 2);
    for one in &mut progress.rollouts {
        let (tokens, finished) = match (step.placed[one.request as usize].worker, one.response) {
            (0, 0) | (1, 1) => (100, true),
            (0, _) => (160, false),
            (1, _) => (50, false),
            _ => (1, false),
        };
        (one.tokens, one.finished) = (tokens, finished);
    }
    let mut past = history(&lengths);
    // Of those with near predictions, some were much longer.
    past.prompts.extend(
        (100..140)
            .map(|prompt| PromptHistory { prompt, steps: vec![vec![100], vec![400], vec![100]] }),
    );
    let options = MigrationOptions {
        tail_permille: 500,
        batch_max: 2,
        recompute_permille: 0,
        ..MigrationOptions::default()
    };
    let moves = migrate(&step, &requests(22, 2), &past, &progress, &options).unwrap();
    let to: Vec<Destination> = moves.iter().map(|one| one.to).collect();
    assert_eq!(to, [Destination::Worker(1)]);
}

#[test]
fn a_worker_ends_with_the_last_of_its_rollouts() {
    // Half of those that were longer had 20 left, half 4000: 2010 in the mean, and the last of two 3005. One worker
    // instead of two saves 1015 and not 2010.
    let long = |prompt: u64| {
        vec![vec![100], vec![if prompt.is_multiple_of(2) { 180 } else { 4160 }], vec![100]]
    };
    let steps: Vec<_> = (0..64).map(long).collect();
    let options = |recomputed: u32| MigrationOptions {
        recompute_permille: recomputed * 1000 / 210,
        late_permille: 0,
        ..MigrationOptions::default()
    };
    assert_eq!(moves_of_two(steps.clone(), &options(1500)), 0);
    assert_eq!(moves_of_two(steps, &options(500)), 1);
}
