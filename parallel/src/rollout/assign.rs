//! Ranks prompts by predicted length, cuts them into groups and assigns groups to workers.

use serde::{Deserialize, Serialize};

use super::curve::busy;
use super::trial::Trial;
use super::{
    Curve, GroupCut, History, LengthPredictor, PERMILLE, PROMPT_RESPONSES_MAX, PROMPTS_MAX,
    RolloutError, RolloutRequest, StepOptions, WORKERS_MAX, choose,
};
use dormouse_schedule::{Span, TOKENS_MAX, bisect, check_range};

/// Prompts of similar length and the workers that generate them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// Request numbers, shortest first.
    pub requests: Vec<u32>,
    /// The tier: the range of workers.
    pub workers: Span,
    /// Predicted tokens of all responses.
    pub predicted_tokens: u64,
    /// Predicted tokens of the longest response.
    pub longest_tokens: u64,
}

/// Placement of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedPrompt {
    /// Predicted tokens of each response.
    pub predicted_tokens: u64,
    /// Number of responses.
    pub responses: u32,
    /// Group number.
    pub group: u32,
    /// Worker number.
    pub worker: u32,
}

/// The assignment of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Step number.
    pub step: u64,
    /// Number of workers; some may be idle.
    pub workers: u32,
    /// Groups, shortest first.
    pub groups: Vec<RolloutGroup>,
    /// Placement of each request, by number.
    pub placed: Vec<PlacedPrompt>,
}

impl Assignment {
    /// Assigns a step's requests.
    ///
    /// # Errors
    /// [`RolloutError`] for invalid history or requests, more workers than requests, more groups than workers,
    /// or workers that are no multiple of the groups without a curve.
    pub fn of(
        history: &History,
        requests: &[RolloutRequest],
        predictor: &LengthPredictor,
        options: &StepOptions,
    ) -> Result<Self, RolloutError> {
        let predicted = predictor.predict(history, requests)?;
        let workers = options.workers;
        let most = WORKERS_MAX.min(requests.len() as u32);
        check_range("workers", workers, 1, most)?;
        check_range("groups", options.groups.unwrap_or(workers), 1, workers)?;
        let tokens: Vec<u64> = predicted.iter().map(|one| one.tokens).collect();
        let ranked = Ranked::of(requests, options.cut, &tokens);
        let trials = || Trial::all(predictor, history, requests, &predicted);
        let tiers = choose::tiers(&ranked, trials, options)?;
        let dealt = Dealt::of(&ranked, &tiers, options.curve.as_ref());
        let mut assignment = Self { step: options.step, workers, ..Self::default() };
        let mut begin = 0;
        for (members, size) in dealt.groups.into_iter().zip(tiers.sizes) {
            let ascending = Span { begin, end: begin + u64::from(size) };
            begin = ascending.end;
            let work = |request: &u32| ranked.work(*request);
            assignment.groups.push(RolloutGroup {
                workers: mirrored(ascending, options),
                predicted_tokens: members.iter().map(work).sum(),
                longest_tokens: members.last().map_or(0, |request| tokens[*request as usize]),
                requests: members,
            });
        }
        let place = |((place, request), predicted_tokens): ((&Place, &RolloutRequest), u64)| {
            let Place { group, slot } = *place;
            let worker = if is_mirrored(options) { workers - 1 - slot } else { slot };
            PlacedPrompt { predicted_tokens, responses: request.responses, group, worker }
        };
        let places = dealt.places.iter().zip(requests).zip(tokens.iter().copied());
        assignment.placed = places.map(place).collect();
        Ok(assignment)
    }

    /// Checks an assignment that may come from outside.
    pub(super) fn check(&self) -> Result<(), RolloutError> {
        check_range("workers", self.workers, 1, WORKERS_MAX)?;
        check_range("prompts", self.placed.len() as u64, 1, PROMPTS_MAX)?;
        for one in &self.placed {
            check_range("worker of a prompt", one.worker, 0, self.workers - 1)?;
            check_range("responses of a prompt", one.responses, 1, PROMPT_RESPONSES_MAX)?;
            check_range("predicted tokens", one.predicted_tokens, 0, TOKENS_MAX)?;
        }
        for group in &self.groups {
            check_range("last worker of a group", group.workers.end, 0, self.workers.into())?;
        }
        Ok(())
    }
}

/// Groups and their workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tiers {
    /// Workers of each group.
    pub sizes: Vec<u32>,
    /// Of groups of equal count: how their numbers of prompts rise, in thousandths of the mean from the middle to the last
    /// of many groups; the first has as much less. Of G groups the last has this times (G - 1) / G more.
    pub rise_permille: i32,
}

impl Tiers {
    /// Returns tiers of groups whose numbers of prompts do not rise.
    pub(super) fn level(sizes: Vec<u32>) -> Self {
        Self { sizes, rise_permille: 0 }
    }
}

/// Requests with the lengths by which they are ranked.
pub(super) struct Ranked<'a> {
    requests: &'a [RolloutRequest],
    cut: GroupCut,
    tokens: &'a [u64],
    order: Vec<u32>,
}

impl<'a> Ranked<'a> {
    fn of(requests: &'a [RolloutRequest], cut: GroupCut, tokens: &'a [u64]) -> Self {
        let mut order: Vec<u32> = (0..requests.len() as u32).collect();
        order.sort_unstable_by_key(|&request| (tokens[request as usize], request));
        Self { requests, cut, tokens, order }
    }

    /// The same requests with other lengths.
    pub(super) fn with(&self, tokens: &'a [u64]) -> Self {
        Self::of(self.requests, self.cut, tokens)
    }

    /// A trial in which every prediction is right.
    pub(super) fn as_trial(&self) -> Trial {
        let lengths = self.tokens.iter().zip(self.responses());
        Trial {
            predicted: self.tokens.to_vec(),
            lengths: lengths.map(|(tokens, responses)| vec![*tokens; responses]).collect(),
        }
    }

    pub(super) fn responses(&self) -> impl Iterator<Item = usize> {
        self.requests.iter().map(|request| request.responses as usize)
    }

    /// Length and responses of a prompt.
    fn length(&self, request: u32) -> (u64, u32) {
        (self.tokens[request as usize], self.requests[request as usize].responses)
    }

    /// Predicted tokens of all responses.
    fn work(&self, request: u32) -> u64 {
        let (tokens, responses) = self.length(request);
        tokens * u64::from(responses)
    }

    /// The requests of each group, shortest first.
    fn grouped(&self, groups: usize, rise_permille: i32) -> Vec<&[u32]> {
        let cuts = match self.cut {
            GroupCut::EqualCount => counted(self.order.len(), groups, rise_permille),
            GroupCut::EqualWork => {
                let works: Vec<u64> = self.order.iter().map(|&it| self.work(it)).collect();
                equal_work(&works, groups)
            }
        };
        cuts.windows(2).map(|cut| &self.order[cut[0]..cut[1]]).collect()
    }

    /// Returns whether numbers of prompts can rise so: there are several groups, cut by these numbers, and no worker is idle.
    pub(super) fn can_rise(&self, tiers: &Tiers) -> bool {
        tiers.sizes.len() > 1 && self.cut == GroupCut::EqualCount && self.fills(tiers)
    }

    /// Returns whether each group has a prompt for each of its workers.
    pub(super) fn fills(&self, tiers: &Tiers) -> bool {
        let fits = |(members, size): (&[u32], &u32)| members.len() >= *size as usize;
        let groups = self.grouped(tiers.sizes.len(), tiers.rise_permille);
        groups.into_iter().zip(&tiers.sizes).all(fits)
    }

    /// Length and responses of each prompt of each group.
    pub(super) fn grouped_lengths(&self, groups: u32) -> Vec<Vec<(u64, u32)>> {
        let groups = self.grouped(groups as usize, 0).into_iter();
        let lengths =
            |members: &[u32]| members.iter().map(|request| self.length(*request)).collect();
        groups.map(lengths).collect()
    }
}

/// Place of a request if groups ascend.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    group: u32,
    /// Worker of an odd step.
    pub slot: u32,
}

/// Prompts of each group dealt to its tier, longest first and in alternating direction, so that prompts and
/// long prompts are spread evenly. Workers of a tier ascend by predicted time.
pub(super) struct Dealt {
    /// Requests of each group, shortest first.
    groups: Vec<Vec<u32>>,
    /// Place of each request.
    pub places: Vec<Place>,
    pub workers: usize,
}

impl Dealt {
    /// Deals to tiers of these sizes.
    pub(super) fn of(ranked: &Ranked<'_>, tiers: &Tiers, curve: Option<&Curve>) -> Self {
        let sizes = &tiers.sizes;
        let grouped = ranked.grouped(sizes.len(), tiers.rise_permille);
        let mut places = vec![Place::default(); ranked.requests.len()];
        let (mut groups, mut tier) = (Vec::with_capacity(sizes.len()), 0);
        for ((group, members), &size) in (0..).zip(grouped).zip(sizes) {
            for (turn, &request) in (0_u32..).zip(members.iter().rev()) {
                let (round, slot) = (turn / size, turn % size);
                let slot = if round.is_multiple_of(2) { slot } else { size - 1 - slot };
                places[request as usize] = Place { group, slot: tier + slot };
            }
            groups.push(members.to_vec());
            tier += size;
        }
        let mut dealt = Self { groups, places, workers: tier as usize };
        if sizes.iter().any(|size| *size > 1) {
            dealt.ascend(ranked, tiers, curve);
        }
        dealt
    }

    /// Orders the workers of each tier by predicted time, of equal ones by predicted tokens.
    fn ascend(&mut self, ranked: &Ranked<'_>, tiers: &Tiers, curve: Option<&Curve>) {
        let mut lengths: Vec<Vec<(u64, u32)>> = vec![Vec::new(); self.workers];
        let mut works = vec![0; self.workers];
        for (request, place) in (0..).zip(&self.places) {
            lengths[place.slot as usize].push(ranked.length(request));
            works[place.slot as usize] += ranked.work(request);
        }
        let times = lengths.iter_mut().map(|all| busy(curve, all));
        let predicted: Vec<(f64, u64)> = times.zip(works).collect();
        let mut slots = vec![0; self.workers];
        let mut begin = 0;
        for size in &tiers.sizes {
            let mut order: Vec<u32> = (begin..begin + size).collect();
            order.sort_by(|one, other| {
                let [one, other] = [one, other].map(|slot| predicted[*slot as usize]);
                one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
            });
            for (slot, old) in (begin..).zip(order) {
                slots[old as usize] = slot;
            }
            begin += size;
        }
        for place in &mut self.places {
            place.slot = slots[place.slot as usize];
        }
    }
}

fn is_mirrored(options: &StepOptions) -> bool {
    options.step.is_multiple_of(2)
}

/// Mirrors a tier in even steps.
fn mirrored(tier: Span, options: &StepOptions) -> Span {
    if is_mirrored(options) {
        let workers = u64::from(options.workers);
        Span { begin: workers - tier.end, end: workers - tier.begin }
    } else {
        tier
    }
}

/// Returns the first prompt of each group, and the end, of groups whose numbers of prompts rise.
fn counted(prompts: usize, groups: usize, rise_permille: i32) -> Vec<usize> {
    let (all, prompts) = (groups as i128, prompts as i128);
    let thousand = i128::from(PERMILLE);
    // The sum of 1 + rise × (2 × group + 1 - groups) / groups up to a group, over that up to the last.
    let cut = |group| {
        let share = group * (thousand * all + i128::from(rise_permille) * (group - all));
        (prompts * share / (thousand * all * all)) as usize
    };
    (0..=all).map(cut).collect()
}

/// Returns the first prompt of each group, and the end, of groups whose largest sum is smallest, by binary search over the
/// cap. `works[i]`: predicted tokens of the i-th prompt by rank; each group has at least one.
fn equal_work(works: &[u64], groups: usize) -> Vec<usize> {
    let largest = works.iter().max().copied().unwrap_or(0);
    let fits = |cap| cuts_within(works, groups, cap).last() == Some(&works.len());
    cuts_within(works, groups, bisect(largest, works.iter().sum(), fits))
}

/// Returns cuts in which each run takes all that fits within `cap`, leaving one for each later run.
fn cuts_within(works: &[u64], groups: usize, cap: u64) -> Vec<usize> {
    let mut cuts = vec![0];
    let mut at = 0;
    for group in 1..=groups {
        let last = works.len() - (groups - group);
        let mut sum = 0;
        while at < last && sum + works[at] <= cap {
            sum += works[at];
            at += 1;
        }
        cuts.push(at);
    }
    cuts
}
