//! Compares tiers with every split and groups with every cut, checks migrations, and simulates two steps
//! worker by worker.

use std::collections::BTreeSet;

use dormouse_parallel::rollout::{
    Assignment, Curve, Destination, GroupCut, History, LengthPredictor, MigrationOptions, Progress,
    PromptHistory, Rollout, RolloutError, RolloutReport, RolloutRequest, StepOptions, migrate,
    tier_sizes,
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
    StepOptions { step, workers, groups, ..StepOptions::default() }
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

    #[test]
    fn migrations_lose_and_double_nothing(
        lengths in prop::collection::vec(1u64..100, 4..16),
        grown in prop::collection::vec((0u64..150, prop::bool::weighted(0.75)), 48),
        tail in prop_oneof![1 => Just(0u32), 9 => 0u32..1001], growth in 1000u32..3000, batch_max in 0u32..9,
    ) {
        let workers = 4;
        let step = assign(&lengths, 3, &options(1, workers, 2));
        let requests = requests(lengths.len(), 3);
        let mut rollouts = Vec::new();
        for request in 0..lengths.len() as u32 {
            for response in 0..3 {
                let (tokens, finished) = grown[(request * 3 + response) as usize];
                let worker = step.placed[request as usize].worker;
                rollouts.push(Rollout { request, response, worker, tokens, finished });
            }
        }
        let progress = Progress { rollouts: rollouts.clone() };
        let limits = MigrationOptions { tail_permille: tail, growth_permille: growth, batch_max };
        let moves = migrate(&step, &requests, &progress, &limits).unwrap();
        let (here, deferred) = progress.after(&moves);
        let name = |one: &Rollout| (one.request, one.response, one.tokens, one.finished);
        let mut after: Vec<_> = here.rollouts.iter().chain(&deferred).map(name).collect();
        after.sort_unstable();
        prop_assert_eq!(after, rollouts.iter().map(name).collect::<Vec<_>>());

        let on = |worker: u32| rollouts.iter().filter(move |one| one.worker == worker);
        let in_tail = |worker: u32| {
            let left = on(worker).filter(|one| !one.finished).count() as u64;
            let share = left * 1000 <= on(worker).count() as u64 * u64::from(tail);
            share || left == 1 && tail > 0
        };
        let outgrew = |one: &&Rollout| {
            !one.finished && in_tail(one.worker)
                && one.tokens * 1000 > lengths[one.request as usize] * u64::from(growth)
        };
        let wanted: BTreeSet<_> = rollouts.iter().filter(outgrew).map(name).collect();
        let moved: BTreeSet<_> = moves
            .iter()
            .map(|one| (one.request, one.response, one.tokens, false))
            .collect();
        prop_assert_eq!(moved, wanted);
        let longest = |worker: u32| {
            let tier = |group: &&dormouse_parallel::rollout::RolloutGroup| {
                (group.workers.begin..group.workers.end).contains(&worker.into())
            };
            step.groups.iter().find(tier).unwrap().longest_tokens
        };
        for one in &moves {
            prop_assert_eq!(one.recompute_tokens, 50 + one.tokens);
            let Destination::Worker(to) = one.to else { continue };
            prop_assert!(longest(to) > longest(one.from) && longest(to) > one.tokens);
            prop_assert!(on(to).any(|one| !one.finished), "its step has not ended");
            let left = here.rollouts.iter().filter(|one| one.worker == to && !one.finished).count();
            prop_assert!(left <= batch_max as usize);
        }
    }
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
        let options = StepOptions { curve: curve_given, slope_permille, ..options(1, 16, 4) };
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
    Progress { rollouts: all.collect() }
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
    let limits = MigrationOptions { growth_permille: 999, ..MigrationOptions::default() };
    assert!(migrate(&step, &requests(4, 2), &good, &limits).is_err());
    assert!(migrate(&step, &requests(3, 2), &good, &MigrationOptions::default()).is_err());
}
