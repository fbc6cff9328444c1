//! Takes moves out of a plan that it does as well without.
//!
//! A look-ahead evicts for an excess that it expects. An eviction that was not needed costs writes,
//! and if a step waits for the drives, it costs time.

use crate::machine::Machine;
use crate::moves::{Action, Move, Plan};
use crate::planner::Found;
use crate::score::mix;
use crate::timeline::Stuck;
use crate::trace::Trace;

/// Share by which a step may become longer under other kernel times.
const TROUBLE: f64 = 1e-3;

/// An eviction and the fetch that undoes it, by their places in the plan.
fn pairs(moves: &[Move]) -> Vec<(usize, usize)> {
    let undone_by = |place: usize| {
        let tensor = moves[place].tensor;
        let others = (place + 1..moves.len()).chain(0..place);
        others.into_iter().find(|&other| moves[other].tensor == tensor)
    };
    (0..moves.len())
        .filter(|&place| moves[place].action != Action::Fetch)
        .filter_map(|place| Some((place, undone_by(place)?)))
        .filter(|&(_, other)| moves[other].action == Action::Fetch)
        .collect()
}

/// Leaves out pairs of moves, one after the other, as long as the step gets no longer, nor
/// noticeably longer under other kernel times. Judges at most `judged_max` plans.
///
/// # Panics
/// Never: a part of a plan is a plan.
pub fn prune(
    trace: &Trace,
    machine: &Machine,
    mut best: Found,
    judged_max: usize,
) -> Result<Found, Stuck> {
    let moves = best.plan.moves().to_vec();
    // Under other kernel times a move may be worth more.
    let troubled_max = best.troubled * (1.0 + TROUBLE);
    let mut is_kept = vec![true; moves.len()];
    let mut pairs = pairs(&moves);
    // In a scattered order, so that the left-out pairs are spread over the step.
    pairs.sort_by_key(|&(place, _)| mix(place as u64));
    for (evict, fetch) in pairs.into_iter().take(judged_max) {
        (is_kept[evict], is_kept[fetch]) = (false, false);
        let kept =
            moves.iter().zip(&is_kept).filter(|entry| *entry.1).map(|entry| *entry.0).collect();
        let plan = Plan::new(kept, trace, machine).expect("every move was in a plan");
        let found = Found::judge(trace, machine, plan)?;
        if found.seconds <= best.seconds && found.troubled <= troubled_max {
            best = found;
        } else {
            (is_kept[evict], is_kept[fetch]) = (true, true);
        }
    }
    Ok(best)
}
