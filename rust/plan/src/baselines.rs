//! Plans of other systems, as their papers describe them, for the same simulator to judge.

use crate::greedy::{Books, Budget, Manner, Period, moves_of, periods};
use crate::machine::{Machine, Tier};
use crate::moves::{Action, Move, Plan};
use crate::trace::{Class, Trace};

/// TERAIO's algorithm 1 (arXiv 2506.06472): while some kernel needs more than the capacity, it
/// looks at every period again, and takes the period with the largest benefit for each byte. The
/// benefit is the size times the time of the kernels over capacity while the tensor is away, so the
/// size cancels out. The tensor goes to the drives, or to the host if the drives are booked.
///
/// # Panics
/// Never: it moves only tensors of the trace.
pub fn teraio(trace: &Trace, machine: &Machine) -> Plan {
    let count = trace.kernels().len();
    let all = [Budget { bytes: machine.device_bytes, counts: vec![true; trace.tensors().len()] }];
    let seconds: Vec<f64> = trace.kernels().iter().map(|kernel| kernel.seconds).collect();
    let manner = Manner { seconds: &seconds, host_first: false };
    let mut books = Books::new(trace, machine, &all, manner);
    let mut left: Vec<Period> = periods(trace, 1);
    let mut moves = Vec::new();
    while books.left_bytes() > 0 {
        let short_before = books.excess().short_before();
        let step = short_before[count];
        let short_by =
            |kernel: usize| short_before[kernel % count] + step * (kernel / count) as f64;
        let mut best: Option<(f64, usize, Tier, (usize, usize))> = None;
        for (place, &period) in left.iter().enumerate() {
            let on_drives = books.away(period, Tier::Ssd).map(|away| (Tier::Ssd, away));
            let found = on_drives.or_else(|| {
                let lends = machine.host_bytes > 0;
                books.away(period, Tier::Host).filter(|_| lends).map(|away| (Tier::Host, away))
            });
            let Some((tier, (gone, back))) = found else { continue };
            let benefit = short_by(back) - short_by(gone + 1);
            if benefit > 0.0 && best.is_none_or(|known| benefit > known.0) {
                best = Some((benefit, place, tier, (gone, back)));
            }
        }
        let Some((_, place, tier, away)) = best else { break };
        let period = left.swap_remove(place);
        books.take(period, tier, away);
        moves.extend(moves_of(period, tier, away.1, count));
    }
    Plan::new(moves, trace, machine).expect("only what is there is moved")
}

/// The longest idle period of each activation within the step: from forward to backward.
fn saved(trace: &Trace) -> Vec<Period> {
    let mut found: Vec<Period> = Vec::new();
    for period in periods(trace, 1) {
        if trace.tensors()[period.tensor as usize].class != Class::Activation {
            continue;
        }
        match found.last_mut().filter(|last| last.tensor == period.tensor) {
            Some(last) if last.next - last.after < period.next - period.after => *last = period,
            Some(_) => {}
            None => found.push(period),
        }
    }
    found.sort_by_key(|period| period.after);
    found
}

/// The cut of `SSDTrain` (arXiv 2408.10013, and its code). Activations go to the drives in the
/// order of forward, up to the first activation n with (bytes before it + 2 x its own) / (3 T - 2 x
/// time before it) above the rate of writing; T is the time of forward. Backward asks for each
/// activation while the activation before it is needed.
///
/// # Panics
/// Never: it moves only tensors of the trace.
pub fn ssdtrain_cut(trace: &Trace, machine: &Machine) -> Plan {
    let saved = saved(trace);
    let count = trace.kernels().len();
    let mut before = vec![0.0];
    for kernel in trace.kernels() {
        before.push(before[before.len() - 1] + kernel.seconds);
    }
    // Forward ends at the kernel that makes the last activation.
    let forward_s = saved.last().map_or(0.0, |last| before[last.after + 1]);
    let mut bytes_before = 0;
    let mut taken = Vec::new();
    for &period in &saved {
        let bytes = trace.tensors()[period.tensor as usize].bytes;
        let left_s = 3.0 * forward_s - 2.0 * before[period.after];
        if (bytes_before + 2 * bytes) as f64 / left_s > machine.ssd.out {
            break;
        }
        bytes_before += bytes;
        if trace.tensors()[period.tensor as usize].places.ssd {
            taken.push(period);
        }
    }
    taken.sort_by_key(|period| period.next);
    let mut moves = Vec::new();
    for (place, period) in taken.iter().enumerate() {
        let needed_before = place.checked_sub(1).map_or(period.after, |last| taken[last].next);
        let asked = needed_before.max(period.after + 1).min(period.next - 1);
        let after = (period.after % count) as u32;
        let evict = Action::Evict(Tier::Ssd);
        moves.push(Move { tensor: period.tensor, action: evict, after, priority: 0.0 });
        moves.push(Move {
            tensor: period.tensor,
            action: Action::Fetch,
            after: (asked % count) as u32,
            priority: period.next as f64,
        });
    }
    Plan::new(moves, trace, machine).expect("only what is there is moved")
}
