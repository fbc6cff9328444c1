//! What a plan is to achieve, and the plan that does: the shortest step within a memory, or the
//! least memory within a step.
//!
//! A draft (`greedy.rs`) is made in a fraction of a second for any size of step. As long as tries
//! are left, the look-ahead then looks for a better one. Whatever is found is judged by the same
//! simulator.

use crate::bound::least_step_seconds;
use crate::greedy::{Budget, Manner, draft};
use crate::machine::Machine;
use crate::moves::Plan;
use crate::planner;
use crate::recompute::{Candidate, candidates, with_recomputed};
use crate::simulator;
use crate::timeline::{LastStep, Stuck};
use crate::trace::{Class, Tensor, Trace};
use std::collections::HashSet;

/// Steps that the judge plays; the last one is told.
const STEPS: usize = 3;

/// Halvings of the range in which the least memory lies: to a thousandth of it.
const HALVINGS: usize = 10;

/// Shares of what can be computed again, in the order of its price, that are tried at first.
const SHARES: [f64; 4] = [0.25, 0.5, 0.75, 1.0];

/// Drafts for each of those.
const ADVICE_DRAFTS: usize = 2;

/// A step that is shorter by less is not worth what it takes.
const NOTABLE: f64 = 1e-3;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The step.
    pub trace: &'a Trace,
    /// The machine; its memory is the budget of all tensors.
    pub machine: &'a Machine,
    /// Budgets of some tensors besides.
    pub budgets: &'a [Budget],
    /// Drafts that may be made of each manner, at least one.
    pub drafts: usize,
    /// Look-aheads that may be tried then.
    pub tries: usize,
    /// Whether tensors may be computed again where a step is longer otherwise.
    pub may_recompute: bool,
}

/// A plan, and what the simulator says of its last step.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The plan, for the step with what is computed again.
    pub plan: Plan,
    /// Tensors that are computed again.
    pub recomputed: Vec<u32>,
    /// By how much budgets besides the device's memory are exceeded, by what was booked.
    pub left_bytes: u64,
    /// How long the step takes.
    pub step_s: f64,
    /// How long it takes its kernels to wait, of that.
    pub stall_s: f64,
    /// How long it takes to compute tensors again, of that.
    pub recompute_s: f64,
    /// Bytes that began to move: to the drives, to the host, back from the drives, from the host.
    pub moved_bytes: [u64; 4],
    /// The most that was in use.
    pub most: LastStep,
    /// Bytes in the device's memory from each of these times of the step on.
    pub resident: Vec<(f64, u64)>,
    /// What each kernel took, its wait included.
    taken: Vec<f64>,
}

/// Let the simulator judge a plan.
pub fn judge(trace: &Trace, machine: &Machine, plan: Plan) -> Result<Judged, Stuck> {
    let seconds: Vec<f64> = trace.kernels().iter().map(|one| one.seconds).collect();
    let timeline = simulator::run(trace, machine, &seconds, STEPS, &plan)?;
    let first = seconds.len() * (STEPS - 1);
    let start = timeline.ends()[first - 1];
    let stalls = &timeline.stalls()[first..];
    let resident = timeline.resident_bytes();
    let ends = timeline.ends();
    let taken = (first..ends.len()).map(|at| ends[at] - ends[at - 1]).collect();
    let before = resident.partition_point(|one| one.0 <= start).saturating_sub(1);
    Ok(Judged {
        recomputed: Vec::new(),
        left_bytes: 0,
        step_s: timeline.steady_seconds(),
        stall_s: stalls.iter().map(|one| one.seconds).sum(),
        recompute_s: 0.0,
        moved_bytes: timeline.last_moved_bytes(),
        most: *timeline.last_step(),
        resident: resident[before..].iter().map(|one| ((one.0 - start).max(0.0), one.1)).collect(),
        plan,
        taken,
    })
}

/// The most bytes of some tensors that are in the device's memory at once in a plan's last step.
///
/// # Panics
/// If the plan is for another step, or there are not as many counts as tensors.
pub fn peak_of(
    trace: &Trace,
    machine: &Machine,
    judged: &Judged,
    counts: &[bool],
) -> Result<u64, Stuck> {
    let chosen: HashSet<u32> = judged.recomputed.iter().copied().collect();
    // The cheapest are chosen first, so they have the order that they had then.
    let again: Vec<Candidate> =
        candidates(trace).into_iter().filter(|one| chosen.contains(&one.tensor)).collect();
    let changed = with_recomputed(trace, &again);
    let counted = counts.iter().copied().chain(again.iter().map(|one| counts[one.tensor as usize]));
    // The simulator counts by class, and treats all classes alike.
    let marked = changed.tensors().iter().zip(counted).map(|(&one, is_counted)| Tensor {
        class: if is_counted { Class::Activation } else { Class::Workspace },
        ..one
    });
    let marked = Trace::new(changed.kernels().to_vec(), marked.collect()).expect("as it was");
    let same = judge(&marked, machine, judged.plan.clone())?;
    Ok(same.most.class_peak_bytes[Class::Activation as usize])
}

/// Every budget of a request, the device's memory first. What is computed again has its second
/// lives behind the other tensors, and they count as the first ones do.
fn all_budgets(request: &Request, recomputed: &[Candidate]) -> Vec<Budget> {
    let tensor_count = request.trace.tensors().len() + recomputed.len();
    let device = Budget { bytes: request.machine.device_bytes, counts: vec![true; tensor_count] };
    let more = request.budgets.iter().map(|one| {
        let again = recomputed.iter().map(|candidate| one.counts[candidate.tensor as usize]);
        let counts = one.counts.iter().copied().chain(again).collect();
        Budget { bytes: one.bytes, counts }
    });
    std::iter::once(device).chain(more).collect()
}

/// The best draft of a step in which some tensors are computed again. If the step may come without
/// waits, kernels are taken to need what they compute. Otherwise, and in the next drafts, they are
/// taken to need what they took under the best plan so far, or without a plan: waits are where
/// bytes have to move, and there a draft has time to move them.
fn drafted(request: &Request, recomputed: &[Candidate]) -> Result<Judged, Stuck> {
    let machine = request.machine;
    let changed;
    let trace = if recomputed.is_empty() {
        request.trace
    } else {
        changed = with_recomputed(request.trace, recomputed);
        &changed
    };
    let budgets = all_budgets(request, recomputed);
    let undisturbed: Vec<f64> = trace.kernels().iter().map(|one| one.seconds).collect();
    let manners: &[bool] = if machine.host_bytes > 0 { &[false, true] } else { &[false] };
    let must_wait = least_step_seconds(trace, machine) > trace.ideal_seconds() * (1.0 + NOTABLE);
    let mut best = judge(trace, machine, Plan::none(trace))?;
    best.left_bytes = if request.budgets.is_empty() { 0 } else { u64::MAX };
    for &host_first in manners {
        let mut failed = 0;
        for attempt in 0..request.drafts.max(1) {
            let is_first = attempt == 0 && !must_wait;
            let seconds = if is_first { &undisturbed } else { &best.taken };
            let made = draft(trace, machine, &budgets, Manner { seconds, host_first });
            let mut found = judge(trace, machine, made.plan)?;
            let waits = found.stall_s > NOTABLE * found.step_s;
            // A budget that no simulator holds has to be covered by what was booked.
            found.left_bytes = if request.budgets.is_empty() { 0 } else { made.left_bytes };
            let is_done = !waits && found.left_bytes == 0;
            if is_better(&found, &best) {
                (best, failed) = (found, 0);
            } else {
                failed += 1;
            }
            if is_done || failed > 1 {
                break;
            }
        }
    }
    best.recomputed = recomputed.iter().map(|one| one.tensor).collect();
    best.recompute_s = trace.ideal_seconds() - request.trace.ideal_seconds();
    Ok(best)
}

/// Nearer to the budgets, or shorter; among equals the one that writes less to the drives.
fn is_better(one: &Judged, other: &Judged) -> bool {
    if one.left_bytes != other.left_bytes {
        return one.left_bytes < other.left_bytes;
    }
    if (one.step_s / other.step_s - 1.0).abs() < NOTABLE {
        return one.moved_bytes[0] < other.moved_bytes[0];
    }
    one.step_s < other.step_s
}

/// The shortest step that is found within the machine's memory and the budgets.
pub fn least_step(request: &Request) -> Result<Judged, Stuck> {
    let mut best = drafted(request, &[])?;
    let ideal = request.trace.ideal_seconds();
    if request.tries > 0 && request.budgets.is_empty() && best.step_s > ideal * (1.0 + NOTABLE) {
        let found = planner::search(request.trace, request.machine, request.tries)?;
        let found = judge(request.trace, request.machine, found.plan)?;
        if is_better(&found, &best) {
            best = found;
        }
    }
    if request.may_recompute && (best.left_bytes > 0 || best.step_s > ideal * (1.0 + NOTABLE)) {
        return with_advice(request, best);
    }
    Ok(best)
}

/// Look for the share of what can be computed again, the cheapest first, with the shortest step of
/// those that keep the budgets: what moves costs nothing as long as it hides, so the step falls
/// with the share and then rises.
fn with_advice(request: &Request, without: Judged) -> Result<Judged, Stuck> {
    let candidates = candidates(request.trace);
    let tried = |share: f64| -> Result<Judged, Stuck> {
        let chosen = &candidates[..(share * candidates.len() as f64).ceil() as usize];
        drafted(&Request { drafts: ADVICE_DRAFTS, ..request.clone() }, chosen)
    };
    let mut best = (0.0, without);
    if candidates.is_empty() {
        return Ok(best.1);
    }
    let consider = |best: &mut (f64, Judged), share: f64| -> Result<(), Stuck> {
        let found = tried(share)?;
        let (left, known) = (found.left_bytes, best.1.left_bytes);
        let is_shorter = found.step_s < best.1.step_s * (1.0 - NOTABLE);
        if left < known || (left == known && is_shorter) {
            *best = (share, found);
        }
        Ok(())
    };
    for share in SHARES {
        consider(&mut best, share)?;
    }
    let mut reach = SHARES[0];
    for _ in 0..3 {
        reach /= 2.0;
        let middle = best.0;
        for share in [middle - reach, middle + reach] {
            if share > 0.0 && share <= 1.0 {
                consider(&mut best, share)?;
            }
        }
    }
    Ok(best.1)
}

/// The least memory, in bytes, within which a step is found that is at most so much longer than one
/// that never waits; and that step.
pub fn least_peak(request: &Request, slowdown_max: f64) -> Result<(u64, Judged), Stuck> {
    let trace = request.trace;
    let step_max = trace.ideal_seconds() * (1.0 + slowdown_max);
    let most = trace.live_bytes().into_iter().max().unwrap_or(0);
    let within = |device_bytes: u64| -> Option<Judged> {
        let machine = Machine { device_bytes, ..*request.machine };
        let found = least_step(&Request { machine: &machine, ..request.clone() });
        // A memory in which some kernel cannot run is too small.
        found.ok().filter(|one| one.step_s <= step_max)
    };
    let all = Machine { device_bytes: most, ..*request.machine };
    let mut best = (most, least_step(&Request { machine: &all, ..request.clone() })?);
    let mut low = least_peak_bytes(trace, request.machine, slowdown_max);
    for _ in 0..HALVINGS {
        let middle = low.midpoint(best.0);
        match within(middle) {
            Some(found) => best = (middle, found),
            None => low = middle,
        }
    }
    Ok(best)
}

/// Bytes below which no peak comes in a step that is at most so much longer than its kernels, if
/// nothing is computed again: what the bound on the step allows, and what one kernel uses.
pub fn least_peak_bytes(trace: &Trace, machine: &Machine, slowdown_max: f64) -> u64 {
    let step_max = trace.ideal_seconds() * (1.0 + slowdown_max);
    let used = |uses: &[u32]| uses.iter().map(|&one| trace.tensors()[one as usize].bytes).sum();
    let floor: u64 = trace.kernels().iter().map(|one| used(&one.uses)).max().unwrap_or(0);
    let most = trace.live_bytes().into_iter().max().unwrap_or(0);
    let (mut low, mut high) = (0, most);
    while low + 1 < high {
        let middle = u64::midpoint(low, high);
        let machine = Machine { device_bytes: middle, ..*machine };
        if least_step_seconds(trace, &machine) <= step_max * (1.0 + 1e-12) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high.max(floor)
}
