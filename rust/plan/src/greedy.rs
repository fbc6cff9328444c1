//! A first plan in a fraction of a second: periods in which a tensor lies idle, taken one after the
//! other with their transfers booked.
//!
//! TERAIO (arXiv 2506.06472, algorithm 1) and G10 (MICRO '23) choose so. What is other here: a
//! period is worth the excess that it covers, min(size, excess), for each second of transfer; a
//! heap keeps the worth of each, looked at again only when it comes to the top (worth only falls as
//! others are taken); and where the drives cannot cover all, kernels are taken to last as long as
//! they did under another plan, with their waits (`objective.rs`).

use crate::excess::Excess;
use crate::ledger::{Ledger, Order};
use crate::machine::{Machine, Tier, Way};
use crate::moves::{Action, Move, Plan};
use crate::trace::{Places, Trace};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Transfers are booked with so much more time than they take.
const MARGIN: f64 = 1.02;

/// A period is taken though another may be worth so much more: to look at that again costs time.
const NEARLY: f64 = 0.9;

/// How much of some tensors may be in the device's memory at once.
#[derive(Clone, Debug)]
pub struct Budget {
    /// The limit.
    pub bytes: u64,
    /// For each tensor whether it counts.
    pub counts: Vec<bool>,
}

/// How a plan is drafted.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// What each kernel is taken to need, with waits that are expected.
    pub seconds: &'a [f64],
    /// Whether the host's memory is used before the drives: they are written less.
    pub host_first: bool,
}

/// A plan, and the bytes that it leaves over a budget at some kernel.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The plan.
    pub plan: Plan,
    /// The most excess that is left, by what was booked.
    pub left_bytes: u64,
}

/// A stretch in which a tensor is not used: after one kernel, before another, counted on into the
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

/// Every period of the tensors that may leave and have at least so many bytes.
pub fn periods(trace: &Trace, smallest: u64) -> Vec<Period> {
    let count = trace.kernels().len();
    let mut found = Vec::new();
    for (tensor, one) in trace.tensors().iter().enumerate() {
        let tensor = tensor as u32;
        let users = trace.users(tensor);
        if one.places == Places::NONE || one.bytes < smallest || users.is_empty() {
            continue;
        }
        let gaps = users.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
        let wrapped = (users[users.len() - 1] as usize, users[0] as usize + count);
        let all = gaps.chain(one.is_global.then_some(wrapped));
        found.extend(all.filter(|(after, next)| next - after > 1).map(|(after, next)| Period {
            tensor,
            after,
            next,
        }));
    }
    found
}

/// What the living tensors that count take while each kernel runs.
fn counted_bytes(trace: &Trace, counts: &[bool]) -> Vec<i64> {
    let bytes = |one: u32| {
        let is_counted = counts[one as usize];
        if is_counted { trace.tensors()[one as usize].bytes as i64 } else { 0 }
    };
    let all = 0..trace.tensors().len() as u32;
    let mut live: i64 = all
        .filter(|&one| trace.tensors()[one as usize].is_global && !trace.users(one).is_empty())
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

/// What a period would cover by one tier.
#[derive(Clone, Copy, Debug)]
struct Worth {
    /// Seconds of excess that each byte covers, for each second of its transfers.
    rank: f64,
    tier: Tier,
    /// The kernel in which its memory is free at the end, and the one in which it comes back.
    gone: usize,
    back: usize,
}

/// A period in the heap, with the worth it had when it was looked at last.
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

/// Budgets, channels and the host's memory as far as they are taken.
pub(crate) struct Books<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    manner: Manner<'a>,
    excesses: Vec<Excess>,
    counts: Vec<&'a [bool]>,
    host: Excess,
    /// Out and in, of the drives and of the host.
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
            Excess::new(seconds, bytes.iter().map(|one| one - budget.bytes as i64).collect())
        };
        let ledger = Ledger::new(seconds);
        let host_free = vec![-(machine.host_bytes as i64); seconds.len()];
        Self {
            trace,
            machine,
            manner,
            excesses: budgets.iter().map(over).collect(),
            counts: budgets.iter().map(|one| one.counts.as_slice()).collect(),
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

    /// The kernels between whose starts a period may be away, if it goes to a tier.
    pub(crate) fn away(&mut self, one: Period, tier: Tier) -> Option<(usize, usize)> {
        if !self.trace.tensors()[one.tensor as usize].places.has(tier) {
            return None;
        }
        let between = (one.after + 1, one.next);
        if tier == Tier::Host {
            let (_, most) = self.host.short(between.0..between.1);
            if most + self.bytes(one.tensor) as i64 > 0 {
                return None;
            }
        }
        let out_s = self.seconds_of(one.tensor, tier, Way::Out);
        let back_s = self.seconds_of(one.tensor, tier, Way::In);
        let [out, back] = &mut self.ledgers[tier as usize];
        let gone = out.find(between, out_s, Order::Early)?;
        let comes = back.find((gone + 1, between.1), back_s, Order::Late)?;
        (gone + 1 < comes).then_some((gone, comes))
    }

    fn worth(&mut self, one: Period, tier: Tier) -> Option<Worth> {
        let (gone, back) = self.away(one, tier)?;
        let bytes = self.bytes(one.tensor) as f64;
        let covered = |(excess, counts): (&Excess, &&[bool])| {
            let (seconds, most) = excess.short(gone + 1..back);
            if !counts[one.tensor as usize] || most <= 0 {
                return 0.0;
            }
            seconds * (most as f64 / bytes).min(1.0)
        };
        let covered_s = self.excesses.iter().zip(&self.counts).map(covered).fold(0.0, f64::max);
        let moving_s = self.seconds_of(one.tensor, Tier::Ssd, Way::Out).max(f64::MIN_POSITIVE);
        let rank = covered_s * bytes / moving_s;
        (rank > 0.0).then_some(Worth { rank, tier, gone, back })
    }

    /// The best tier of a period: the first one it can go to.
    fn best(&mut self, one: Period) -> Option<Worth> {
        let tiers = match (self.machine.host_bytes, self.manner.host_first) {
            (0, _) => &[Tier::Ssd][..],
            (_, true) => &[Tier::Host, Tier::Ssd],
            (_, false) => &[Tier::Ssd, Tier::Host],
        };
        let mut best: Option<Worth> = None;
        for &tier in tiers {
            // Another tier has to be much better to be taken before the preferred one.
            let found = self.worth(one, tier);
            match (best, found) {
                (None, _) => best = found,
                (Some(known), Some(other)) if other.rank > 1.5 * known.rank => best = found,
                _ => {}
            }
        }
        best
    }

    pub(crate) fn take(&mut self, one: Period, tier: Tier, (gone, back): (usize, usize)) {
        let bytes = self.bytes(one.tensor) as i64;
        let between = (one.after + 1, one.next);
        let out_s = self.seconds_of(one.tensor, tier, Way::Out);
        let back_s = self.seconds_of(one.tensor, tier, Way::In);
        let [out, into] = &mut self.ledgers[tier as usize];
        out.book(between, out_s, Order::Early);
        into.book((gone + 1, between.1), back_s, Order::Late);
        for (excess, counts) in self.excesses.iter_mut().zip(&self.counts) {
            if counts[one.tensor as usize] {
                excess.add(gone + 1..back, -bytes);
            }
        }
        if tier == Tier::Host {
            self.host.add(between.0..between.1, bytes);
        }
    }
}

/// The two moves of a period that is away.
pub(crate) fn moves_of(one: Period, tier: Tier, back: usize, count: usize) -> [Move; 2] {
    let asked = back - 1;
    let step_start = asked / count * count;
    [
        Move {
            tensor: one.tensor,
            action: Action::Evict(tier),
            after: (one.after % count) as u32,
            priority: 0.0,
        },
        Move {
            tensor: one.tensor,
            action: Action::Fetch,
            after: (asked % count) as u32,
            priority: (one.next - step_start) as f64,
        },
    ]
}

/// Draft a plan for some budgets, the first of which is the device's memory.
///
/// # Panics
/// Never: it moves what is there, and where it may go.
pub fn draft(trace: &Trace, machine: &Machine, budgets: &[Budget], manner: Manner<'_>) -> Draft {
    let count = trace.kernels().len();
    let mut books = Books::new(trace, machine, budgets, manner);
    let smallest = (machine.device_bytes >> 15).max(1);
    let periods = if books.left_bytes() > 0 { periods(trace, smallest) } else { Vec::new() };
    let mut heap = BinaryHeap::new();
    for (place, &one) in periods.iter().enumerate() {
        if let Some(worth) = books.best(one) {
            heap.push(Entry { rank: worth.rank, place: place as u32 });
        }
    }
    let mut moves = Vec::new();
    while books.left_bytes() > 0 {
        let Some(Entry { place, .. }) = heap.pop() else { break };
        let one = periods[place as usize];
        let Some(worth) = books.best(one) else { continue };
        if heap.peek().is_some_and(|next| worth.rank < NEARLY * next.rank) {
            heap.push(Entry { rank: worth.rank, place });
            continue;
        }
        books.take(one, worth.tier, (worth.gone, worth.back));
        moves.extend(moves_of(one, worth.tier, worth.back, count));
    }
    let plan = Plan::new(moves, trace, machine).expect("only what is there is moved");
    Draft { plan, left_bytes: books.left_bytes() }
}
