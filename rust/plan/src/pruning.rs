//! Takes out of a plan what it does as well without.
//!
//! A look-ahead evicts for an excess that it expects; what in the end was not needed costs writes,
//! and where the drives are what a step waits for, it costs time.

use crate::machine::Machine;
use crate::moves::{Action, Move, Plan};
use crate::planner::Found;
use crate::score::mix;
use crate::timeline::Stuck;
use crate::trace::Trace;

/// How much longer a step may become under other kernel times.
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

/// Leave out pairs of moves, one after the other, as long as the step gets no longer, nor
/// noticeably so under other kernel times. At most so many plans are judged.
///
/// # Panics
/// Never: what is left of a plan is a plan.
pub fn prune(
    trace: &Trace,
    machine: &Machine,
    mut best: Found,
    judged_max: usize,
) -> Result<Found, Stuck> {
    let moves = best.plan.moves().to_vec();
    // Under other kernel times a move may be worth more than it seems.
    let troubled_max = best.troubled * (1.0 + TROUBLE);
    let mut is_kept = vec![true; moves.len()];
    let mut pairs = pairs(&moves);
    // In no order, so that what is left out is spread over the step.
    pairs.sort_by_key(|&(place, _)| mix(place as u64));
    for (evict, fetch) in pairs.into_iter().take(judged_max) {
        (is_kept[evict], is_kept[fetch]) = (false, false);
        let kept = moves.iter().zip(&is_kept).filter(|one| *one.1).map(|one| *one.0).collect();
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
