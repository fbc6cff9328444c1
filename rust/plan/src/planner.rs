//! Searches for the plan with the shortest steady step; of equals, for the plan that bears other
//! kernel times better, and then for the plan that writes less.
//!
//! The look-ahead director makes a plan for any weights, and the simulator judges it. The planner
//! first tries weights that did well on other traces, then weights near the best so far. The times
//! of a judged plan tell the director of the next try when kernels really run.

use crate::lookahead::{LookAhead, Weights};
use crate::machine::{Machine, Tier};
use crate::moves::{Action, Move, Plan};
use crate::score::{STEP_COUNT, kernel_seconds, mix};
use crate::simulator;
use crate::timeline::Stuck;
use crate::trace::Trace;

/// Steps that the look-ahead plays. The moves of the last step become the plan.
const STEPS: usize = 3;

/// Steps that are judged under other kernel times.
const ROBUST_STEPS: usize = 2;

/// Steps whose times differ relatively by less are equal.
const EQUAL: f64 = 1e-6;

/// Under other kernel times, plans whose `troubled` differs by less are equal.
const EQUALLY_ROBUST: f64 = 1e-3;

/// Seeds of the kernel times under which a plan is judged besides the trace's own.
const OTHER_TIMES: [u64; 3] = [1_000_003, 1_000_033, 1_000_037];

/// Further tries after a plan without waits, for a plan that bears other kernel times.
const ROBUST_TRIES: usize = 8;

/// A judged plan.
#[derive(Clone, Debug)]
pub struct Found {
    /// The moves.
    pub plan: Plan,
    /// Seconds of its steady step.
    pub seconds: f64,
    /// Its longest step under other kernel times, as a multiple of those times.
    pub troubled: f64,
    /// Bytes that it writes to the drives in a step.
    pub written_bytes: u64,
    /// Seconds of each kernel of the last step, its wait included.
    taken: Vec<f64>,
}

impl Found {
    /// Lets the simulator judge a plan.
    pub fn judge(trace: &Trace, machine: &Machine, plan: Plan) -> Result<Self, Stuck> {
        let undisturbed = kernel_seconds(trace, 0);
        let timeline = simulator::run(trace, machine, &undisturbed, STEP_COUNT, &plan)?;
        let mut troubled = 1.0_f64;
        for seed in OTHER_TIMES {
            let other = kernel_seconds(trace, seed);
            let timeline = simulator::run(trace, machine, &other, ROBUST_STEPS, &plan)?;
            troubled = troubled.max(timeline.steady_seconds() / other.iter().sum::<f64>());
        }
        let ends = timeline.ends();
        let last = ends.len() - undisturbed.len();
        let taken = (last..ends.len()).map(|at| ends[at] - ends[at - 1]).collect();
        let written_bytes = plan
            .moves()
            .iter()
            .filter(|planned| planned.action == Action::Evict(Tier::Ssd))
            .map(|planned| trace.tensors()[planned.tensor as usize].bytes)
            .sum();
        let seconds = timeline.steady_seconds();
        Ok(Self { plan, seconds, troubled, written_bytes, taken })
    }

    fn is_better_than(&self, other: &Self) -> bool {
        if (self.seconds / other.seconds - 1.0).abs() >= EQUAL {
            self.seconds < other.seconds
        } else if (self.troubled - other.troubled).abs() >= EQUALLY_ROBUST {
            self.troubled < other.troubled
        } else {
            self.written_bytes < other.written_bytes
        }
    }
}

/// Weights that did well on machines with host memory, or on machines without.
fn proven(machine: &Machine) -> Vec<Weights> {
    let host = Weights {
        window_s: 0.3,
        cover_share: 0.9,
        lead: 1000.0,
        host_trust: 0.7,
        host_lead: 1.5,
        margin_s: 0.1,
        reserve: 0.005,
    };
    if machine.host_bytes > 0 {
        return vec![
            host,
            Weights { cover_share: 0.5, margin_s: 0.2, reserve: 0.01, ..host },
            Weights { window_s: 0.1, cover_share: 0.99, lead: 10.0, margin_s: 0.2, ..host },
            Weights { cover_share: 0.8, host_trust: 0.4, host_lead: 2.5, margin_s: 0.0, ..host },
            Weights { cover_share: 1.0, margin_s: 0.05, ..host },
        ];
    }
    let drives = Weights { cover_share: 0.3, lead: 6.0, ..host };
    vec![
        drives,
        Weights { lead: 2.0, margin_s: 0.02, reserve: 0.001, ..drives },
        Weights { cover_share: 0.2, lead: 8.0, margin_s: 0.02, reserve: 0.0, ..drives },
        Weights { lead: 1.0, margin_s: 0.1, reserve: 0.001, ..drives },
        Weights { window_s: 0.6, lead: 1.5, margin_s: 0.05, reserve: 0.002, ..drives },
        Weights { lead: 25.0, reserve: 0.001, ..drives },
        Weights { cover_share: 0.7, reserve: 0.01, ..drives },
        Weights { lead: 1.1, reserve: 0.02, ..drives },
    ]
}

/// A number in [0, 1) for a try and a question.
fn random(attempt: usize, question: u64) -> f64 {
    (mix(attempt as u64 * 64 + question) >> 11) as f64 / (1u64 << 53) as f64
}

/// Random weights near the given weights.
fn near(weights: Weights, attempt: usize) -> Weights {
    let change = |question: u64, value: f64, low: f64, high: f64| {
        if random(attempt, 2 * question) < 0.6 {
            return value;
        }
        // Values range over decades, so the change is to their logarithm.
        let factor = (2.0 * random(attempt, 2 * question + 1) - 1.0) * 1.1;
        (value.max(low / 4.0) * factor.exp()).clamp(low, high)
    };
    let kept = change(1, 1.0 - weights.cover_share, 0.001, 1.0);
    Weights {
        window_s: change(2, weights.window_s, 0.01, 3.0),
        cover_share: 1.0 - kept,
        lead: change(3, weights.lead, 1.0, 1000.0),
        host_trust: change(4, weights.host_trust, 0.2, 1.0),
        host_lead: change(5, weights.host_lead, 1.0, 5.0),
        margin_s: change(6, weights.margin_s, 0.005, 1.0),
        reserve: change(7, weights.reserve, 0.001, 0.05),
    }
}

/// The plan that a director with these weights makes.
///
/// # Panics
/// Never: a director names only tensors and kernels of the trace.
pub fn look_ahead(
    trace: &Trace,
    machine: &Machine,
    seconds: &[f64],
    weights: Weights,
) -> Result<Plan, Stuck> {
    let mut director = LookAhead::new(trace, machine, seconds, weights);
    simulator::run(trace, machine, &kernel_seconds(trace, 0), STEPS, &mut director)?;
    let moves: Vec<Move> = director
        .decisions
        .iter()
        .filter(|decision| decision.step == STEPS - 1)
        .map(|decision| decision.chosen)
        .collect();
    Ok(Plan::new(moves, trace, machine).expect("a director names only what is there"))
}

/// The best plan of some tries. The search ends early after a step without waits.
pub fn search(trace: &Trace, machine: &Machine, tries: usize) -> Result<Found, Stuck> {
    let undisturbed = kernel_seconds(trace, 0);
    let ideal: f64 = undisturbed.iter().sum();
    let mut best = Found::judge(trace, machine, Plan::none(trace))?;
    let proven = proven(machine);
    let mut best_weights = proven[0];
    let mut robust_tries = ROBUST_TRIES;
    for attempt in 0..tries {
        if best.seconds <= ideal * (1.0 + EQUAL) {
            if robust_tries == 0 || best.troubled <= 1.0 + EQUALLY_ROBUST {
                break;
            }
            robust_tries -= 1;
        }
        let weights = match proven.get(attempt) {
            Some(&weights) => weights,
            None => near(best_weights, attempt),
        };
        let knows_waits = attempt > 0 && random(attempt, 0) < 0.8;
        let seconds = if knows_waits { &best.taken } else { &undisturbed };
        let plan = look_ahead(trace, machine, seconds, weights)?;
        let found = Found::judge(trace, machine, plan)?;
        if found.is_better_than(&best) {
            (best, best_weights) = (found, weights);
        }
    }
    Ok(best)
}
