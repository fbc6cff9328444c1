//! The two objectives of a plan: the shortest step within a memory, or the least memory within a
//! time of a step.
//!
//! A draft (`greedy.rs`) takes a fraction of a second for a step of any size. If tries are left,
//! the look-ahead then searches for a better plan. The same simulator judges all of them.

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

/// Steps that the simulator plays. The last step is reported.
const STEPS: usize = 3;

/// Number of halvings in the search for the least memory: its error is a thousandth of the range.
const HALVINGS: usize = 10;

/// Shares of the tensors that can be computed again, the cheapest first, which are tried first.
const SHARES: [f64; 4] = [0.25, 0.5, 0.75, 1.0];

/// Number of drafts for each share.
const ADVICE_DRAFTS: usize = 2;

/// A relative gain below this is not worth its cost.
const NOTABLE: f64 = 1e-3;

/// The input of a search.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The step.
    pub trace: &'a Trace,
    /// The machine. Its memory is the budget of all tensors.
    pub machine: &'a Machine,
    /// Further budgets, each for some tensors.
    pub budgets: &'a [Budget],
    /// Number of drafts for each manner, at least one.
    pub drafts: usize,
    /// Number of look-aheads that may be tried after the drafts.
    pub tries: usize,
    /// True if tensors may be computed again when a step would be longer otherwise.
    pub may_recompute: bool,
}

/// A plan, with the simulator's report of its last step.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The plan, for the step with the recomputed tensors.
    pub plan: Plan,
    /// Tensors that are computed again.
    pub recomputed: Vec<u32>,
    /// Most bytes over a further budget, by the booked transfers.
    pub left_bytes: u64,
    /// Seconds of the step.
    pub step_s: f64,
    /// Seconds of the step in which kernels wait.
    pub stall_s: f64,
    /// Seconds of the step that compute tensors again.
    pub recompute_s: f64,
    /// Bytes of transfers that began: to the drives, to the host, back from the drives, back from
    /// the host.
    pub moved_bytes: [u64; 4],
    /// The peaks of the last step.
    pub most: LastStep,
    /// Times of the step, each with the bytes in the device's memory from then on.
    pub resident: Vec<(f64, u64)>,
    /// Seconds of each kernel, its wait included.
    taken: Vec<f64>,
}

/// Lets the simulator judge a plan.
pub fn judge(trace: &Trace, machine: &Machine, plan: Plan) -> Result<Judged, Stuck> {
    let seconds: Vec<f64> = trace.kernels().iter().map(|kernel| kernel.seconds).collect();
    let timeline = simulator::run(trace, machine, &seconds, STEPS, &plan)?;
    let first = seconds.len() * (STEPS - 1);
    let start = timeline.ends()[first - 1];
    let stalls = &timeline.stalls()[first..];
    let resident = timeline.resident_bytes();
    let ends = timeline.ends();
    let taken = (first..ends.len()).map(|at| ends[at] - ends[at - 1]).collect();
    let before = resident.partition_point(|point| point.0 <= start).saturating_sub(1);
    Ok(Judged {
        recomputed: Vec::new(),
        left_bytes: 0,
        step_s: timeline.steady_seconds(),
        stall_s: stalls.iter().map(|stall| stall.seconds).sum(),
        recompute_s: 0.0,
        moved_bytes: timeline.last_moved_bytes(),
        most: *timeline.last_step(),
        resident: resident[before..]
            .iter()
            .map(|point| ((point.0 - start).max(0.0), point.1))
            .collect(),
        plan,
        taken,
    })
}

/// The peak in the device's memory of the tensors in `counts`, in a plan's last step.
///
/// # Panics
/// If the plan is for another step, or the lengths of `counts` and of the tensors differ.
pub fn peak_of(
    trace: &Trace,
    machine: &Machine,
    judged: &Judged,
    counts: &[bool],
) -> Result<u64, Stuck> {
    let chosen: HashSet<u32> = judged.recomputed.iter().copied().collect();
    // Recomputed tensors are the cheapest candidates, so the order of the candidates is their
    // order.
    let again: Vec<Candidate> = candidates(trace)
        .into_iter()
        .filter(|candidate| chosen.contains(&candidate.tensor))
        .collect();
    let changed = with_recomputed(trace, &again);
    let second_lives = again.iter().map(|candidate| counts[candidate.tensor as usize]);
    let counted = counts.iter().copied().chain(second_lives);
    // The simulator counts by class and treats all classes alike.
    let marked = changed.tensors().iter().zip(counted).map(|(&tensor, is_counted)| Tensor {
        class: if is_counted { Class::Activation } else { Class::Workspace },
        ..tensor
    });
    let marked = Trace::new(changed.kernels().to_vec(), marked.collect()).expect("as it was");
    let same = judge(&marked, machine, judged.plan.clone())?;
    Ok(same.most.class_peak_bytes[Class::Activation as usize])
}

/// All budgets of a request, the device's memory first. The second life of a recomputed tensor
/// comes after all other tensors, and counts in the same budgets as the first.
fn all_budgets(request: &Request, recomputed: &[Candidate]) -> Vec<Budget> {
    let tensor_count = request.trace.tensors().len() + recomputed.len();
    let device = Budget { bytes: request.machine.device_bytes, counts: vec![true; tensor_count] };
    let more = request.budgets.iter().map(|budget| {
        let again = recomputed.iter().map(|candidate| budget.counts[candidate.tensor as usize]);
        let counts = budget.counts.iter().copied().chain(again).collect();
        Budget { bytes: budget.bytes, counts }
    });
    std::iter::once(device).chain(more).collect()
}

/// The best draft of a step in which some tensors are computed again. If the step may have no
/// waits, the first draft expects kernels to take their computing time. Otherwise, and in later
/// drafts, it expects the times of the best plan so far, or of no plan. Those contain waits where
/// bytes have to move, so the draft has time there to move them.
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
    let undisturbed: Vec<f64> = trace.kernels().iter().map(|kernel| kernel.seconds).collect();
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
            // The simulator does not check further budgets, so the booked transfers must cover
            // them.
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
    best.recomputed = recomputed.iter().map(|candidate| candidate.tensor).collect();
    best.recompute_s = trace.ideal_seconds() - request.trace.ideal_seconds();
    Ok(best)
}

/// Returns true if a plan is nearer to the budgets, or shorter, or equally short with fewer bytes
/// written.
fn is_better(judged: &Judged, other: &Judged) -> bool {
    if judged.left_bytes != other.left_bytes {
        return judged.left_bytes < other.left_bytes;
    }
    if (judged.step_s / other.step_s - 1.0).abs() < NOTABLE {
        return judged.moved_bytes[0] < other.moved_bytes[0];
    }
    judged.step_s < other.step_s
}

/// Finds the shortest step within the machine's memory and the budgets.
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

/// Searches for the share of recomputed tensors, the cheapest first, with the shortest step that
/// keeps the budgets. Transfers that hide cost nothing, so the time of the step falls with the
/// share and then rises.
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

/// The least memory, in bytes, with a step at most `slowdown_max` longer than a step without waits;
/// and that step.
pub fn least_peak(request: &Request, slowdown_max: f64) -> Result<(u64, Judged), Stuck> {
    let trace = request.trace;
    let step_max = trace.ideal_seconds() * (1.0 + slowdown_max);
    let most = trace.live_bytes().into_iter().max().unwrap_or(0);
    let within = |device_bytes: u64| -> Option<Judged> {
        let machine = Machine { device_bytes, ..*request.machine };
        let found = least_step(&Request { machine: &machine, ..request.clone() });
        // A memory in which a kernel cannot run is too small.
        found.ok().filter(|judged| judged.step_s <= step_max)
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

/// A lower bound of the peak, in bytes, for a step at most `slowdown_max` longer than its kernels,
/// if nothing is computed again: from the bound on the step and from the largest kernel.
pub fn least_peak_bytes(trace: &Trace, machine: &Machine, slowdown_max: f64) -> u64 {
    let step_max = trace.ideal_seconds() * (1.0 + slowdown_max);
    let used =
        |uses: &[u32]| uses.iter().map(|&tensor| trace.tensors()[tensor as usize].bytes).sum();
    let floor: u64 = trace.kernels().iter().map(|kernel| used(&kernel.uses)).max().unwrap_or(0);
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
