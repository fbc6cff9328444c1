//! A first plan in a fraction of a second. It takes periods in which a tensor lies idle, one after
//! the other, and books their transfers.
//!
//! TERAIO (arXiv 2506.06472, algorithm 1) and G10 (MICRO '23) choose so, too. Three things differ.
//! A period is worth the excess that it covers, min(size, excess), for each second of transfer. A
//! heap keeps the worth of each period, and updates it only at the top, because worth only falls as
//! other periods are taken. If the drives cannot cover everything, kernels are expected to last as
//! long as under another plan, with their waits (`objective.rs`).

use crate::excess::Excess;
use crate::ledger::{Ledger, Order};
use crate::machine::{Machine, Tier, Way};
use crate::moves::{Action, Move, Plan};
use crate::trace::{Places, Trace};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Factor of the booked time of a transfer over its expected time.
const MARGIN: f64 = 1.02;

/// Share of the next worth in the heap at which a period is taken, because updating the next costs
/// time.
const NEARLY: f64 = 0.9;

/// A limit on the bytes of some tensors in the device's memory.
#[derive(Clone, Debug)]
pub struct Budget {
    /// The limit.
    pub bytes: u64,
    /// For each tensor, true if it counts.
    pub counts: Vec<bool>,
}

/// The manner of a draft.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// Expected seconds of each kernel, with expected waits.
    pub seconds: &'a [f64],
    /// True if the host's memory is used before the drives, which are then written less.
    pub host_first: bool,
}

/// A plan with the bytes that it leaves over a budget.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The plan.
    pub plan: Plan,
    /// The largest excess that is left, by the booked transfers.
    pub left_bytes: u64,
}

/// A stretch in which a tensor is not used, between two kernels. Kernels are counted on into the
/// next step.
#[derive(Clone, Copy, Debug)]
pub struct Period {
    /// The tensor.
    pub tensor: u32,
    /// The kernel that used it last.
    pub after: usize,
    /// The kernel that uses it next.
    pub next: usize,
}

/// All periods of the tensors that may leave and have at least `smallest` bytes.
pub fn periods(trace: &Trace, smallest: u64) -> Vec<Period> {
    let count = trace.kernels().len();
    let mut found = Vec::new();
    for (tensor, entry) in trace.tensors().iter().enumerate() {
        let tensor = tensor as u32;
        let users = trace.users(tensor);
        if entry.places == Places::NONE || entry.bytes < smallest || users.is_empty() {
            continue;
        }
        let gaps = users.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
        let wrapped = (users[users.len() - 1] as usize, users[0] as usize + count);
        let all = gaps.chain(entry.is_global.then_some(wrapped));
        found.extend(all.filter(|(after, next)| next - after > 1).map(|(after, next)| Period {
            tensor,
            after,
            next,
        }));
    }
    found
}

/// Bytes of the living tensors that count, while each kernel runs.
fn counted_bytes(trace: &Trace, counts: &[bool]) -> Vec<i64> {
    let bytes = |tensor: u32| {
        let is_counted = counts[tensor as usize];
        if is_counted { trace.tensors()[tensor as usize].bytes as i64 } else { 0 }
    };
    let all = 0..trace.tensors().len() as u32;
    let mut live: i64 = all
        .filter(|&tensor| {
            trace.tensors()[tensor as usize].is_global && !trace.users(tensor).is_empty()
        })
        .map(bytes)
        .sum();
    (0..trace.kernels().len())
        .map(|kernel| {
            live += trace.births(kernel).iter().copied().map(bytes).sum::<i64>();
            let here = live;
            live -= trace.deaths(kernel).iter().copied().map(bytes).sum::<i64>();
            here
        })
        .collect()
}

/// The worth of a period that goes to one tier.
#[derive(Clone, Copy, Debug)]
struct Worth {
    /// Seconds of excess that each byte covers, for each second of its transfers.
    rank: f64,
    tier: Tier,
    /// The kernel at whose end its memory is free, and the kernel in which it comes back.
    gone: usize,
    back: usize,
}

/// A period in the heap, with its worth at the last look.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    rank: f64,
    place: u32,
}

impl Eq for Entry {}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank.total_cmp(&other.rank).then(other.place.cmp(&self.place))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The books of budgets, channels and the host's memory.
pub(crate) struct Books<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    manner: Manner<'a>,
    excesses: Vec<Excess>,
    counts: Vec<&'a [bool]>,
    host: Excess,
    /// Ledgers out and in, for the drives and for the host.
    ledgers: [[Ledger; 2]; 2],
}

impl<'a> Books<'a> {
    pub(crate) fn new(
        trace: &'a Trace,
        machine: &'a Machine,
        budgets: &'a [Budget],
        manner: Manner<'a>,
    ) -> Self {
        let seconds = manner.seconds;
        let over = |budget: &Budget| {
            let bytes = counted_bytes(trace, &budget.counts);
            Excess::new(seconds, bytes.iter().map(|live| live - budget.bytes as i64).collect())
        };
        let ledger = Ledger::new(seconds);
        let host_free = vec![-(machine.host_bytes as i64); seconds.len()];
        Self {
            trace,
            machine,
            manner,
            excesses: budgets.iter().map(over).collect(),
            counts: budgets.iter().map(|budget| budget.counts.as_slice()).collect(),
            host: Excess::new(seconds, host_free),
            ledgers: [[ledger.clone(), ledger.clone()], [ledger.clone(), ledger]],
        }
    }

    /// The excess of the first budget.
    pub(crate) fn excess(&self) -> &Excess {
        &self.excesses[0]
    }

    pub(crate) fn bytes(&self, tensor: u32) -> u64 {
        self.trace.tensors()[tensor as usize].bytes
    }

    pub(crate) fn left_bytes(&self) -> u64 {
        let most = self.excesses.iter().map(Excess::most).max().unwrap_or(0);
        u64::try_from(most).unwrap_or(0)
    }

    fn seconds_of(&self, tensor: u32, tier: Tier, way: Way) -> f64 {
        let charged = self.machine.charged_bytes(tier, self.bytes(tensor));
        let mut rate = self.machine.rate(tier, way, true);
        if tier == Tier::Ssd {
            rate *= self.machine.duplex_share;
        }
        (charged / rate + self.machine.latency_s) * MARGIN
    }

    /// The kernels between whose starts a period is away if it goes to a tier.
    pub(crate) fn away(&mut self, period: Period, tier: Tier) -> Option<(usize, usize)> {
        if !self.trace.tensors()[period.tensor as usize].places.has(tier) {
            return None;
        }
        let between = (period.after + 1, period.next);
        if tier == Tier::Host {
            let (_, most) = self.host.short(between.0..between.1);
            if most + self.bytes(period.tensor) as i64 > 0 {
                return None;
            }
        }
        let out_s = self.seconds_of(period.tensor, tier, Way::Out);
        let back_s = self.seconds_of(period.tensor, tier, Way::In);
        let [out, back] = &mut self.ledgers[tier as usize];
        let gone = out.find(between, out_s, Order::Early)?;
        let comes = back.find((gone + 1, between.1), back_s, Order::Late)?;
        (gone + 1 < comes).then_some((gone, comes))
    }

    fn worth(&mut self, period: Period, tier: Tier) -> Option<Worth> {
        let (gone, back) = self.away(period, tier)?;
        let bytes = self.bytes(period.tensor) as f64;
        let covered = |(excess, counts): (&Excess, &&[bool])| {
            let (seconds, most) = excess.short(gone + 1..back);
            if !counts[period.tensor as usize] || most <= 0 {
                return 0.0;
            }
            seconds * (most as f64 / bytes).min(1.0)
        };
        let covered_s = self.excesses.iter().zip(&self.counts).map(covered).fold(0.0, f64::max);
        let moving_s = self.seconds_of(period.tensor, Tier::Ssd, Way::Out).max(f64::MIN_POSITIVE);
        let rank = covered_s * bytes / moving_s;
        (rank > 0.0).then_some(Worth { rank, tier, gone, back })
    }

    /// The preferred tier of a period, unless another tier is much better.
    fn best(&mut self, period: Period) -> Option<Worth> {
        let tiers = match (self.machine.host_bytes, self.manner.host_first) {
            (0, _) => &[Tier::Ssd][..],
            (_, true) => &[Tier::Host, Tier::Ssd],
            (_, false) => &[Tier::Ssd, Tier::Host],
        };
        let mut best: Option<Worth> = None;
        for &tier in tiers {
            // Another tier has to be much better to replace the preferred tier.
            let found = self.worth(period, tier);
            match (best, found) {
                (None, _) => best = found,
                (Some(known), Some(other)) if other.rank > 1.5 * known.rank => best = found,
                _ => {}
            }
        }
        best
    }

    pub(crate) fn take(&mut self, period: Period, tier: Tier, (gone, back): (usize, usize)) {
        let bytes = self.bytes(period.tensor) as i64;
        let between = (period.after + 1, period.next);
        let out_s = self.seconds_of(period.tensor, tier, Way::Out);
        let back_s = self.seconds_of(period.tensor, tier, Way::In);
        let [out, into] = &mut self.ledgers[tier as usize];
        out.book(between, out_s, Order::Early);
        into.book((gone + 1, between.1), back_s, Order::Late);
        for (excess, counts) in self.excesses.iter_mut().zip(&self.counts) {
            if counts[period.tensor as usize] {
                excess.add(gone + 1..back, -bytes);
            }
        }
        if tier == Tier::Host {
            self.host.add(between.0..between.1, bytes);
        }
    }
}

/// The two moves of a period that is taken.
pub(crate) fn moves_of(period: Period, tier: Tier, back: usize, count: usize) -> [Move; 2] {
    let asked = back - 1;
    let step_start = asked / count * count;
    [
        Move {
            tensor: period.tensor,
            action: Action::Evict(tier),
            after: (period.after % count) as u32,
            priority: 0.0,
        },
        Move {
            tensor: period.tensor,
            action: Action::Fetch,
            after: (asked % count) as u32,
            priority: (period.next - step_start) as f64,
        },
    ]
}

/// Drafts a plan for some budgets. The first budget is the device's memory.
///
/// # Panics
/// Never: it moves only tensors of the trace, and only to allowed tiers.
pub fn draft(trace: &Trace, machine: &Machine, budgets: &[Budget], manner: Manner<'_>) -> Draft {
    let count = trace.kernels().len();
    let mut books = Books::new(trace, machine, budgets, manner);
    let smallest = (machine.device_bytes >> 15).max(1);
    let periods = if books.left_bytes() > 0 { periods(trace, smallest) } else { Vec::new() };
    let mut heap = BinaryHeap::new();
    for (place, &period) in periods.iter().enumerate() {
        if let Some(worth) = books.best(period) {
            heap.push(Entry { rank: worth.rank, place: place as u32 });
        }
    }
    let mut moves = Vec::new();
    while books.left_bytes() > 0 {
        let Some(Entry { place, .. }) = heap.pop() else { break };
        let period = periods[place as usize];
        let Some(worth) = books.best(period) else { continue };
        if heap.peek().is_some_and(|next| worth.rank < NEARLY * next.rank) {
            heap.push(Entry { rank: worth.rank, place });
            continue;
        }
        books.take(period, worth.tier, (worth.gone, worth.back));
        moves.extend(moves_of(period, worth.tier, worth.back, count));
    }
    let plan = Plan::new(moves, trace, machine).expect("only what is there is moved");
    Draft { plan, left_bytes: books.left_bytes() }
}
