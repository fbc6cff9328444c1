//! The four channels: the queue of each, and the transfer that each carries.

use crate::machine::{Machine, Tier, Way};
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Least share of its speed that computing keeps beside transfers.
const SPEED_MIN: f64 = 0.1;

/// Number of channels: each tier, each direction.
pub const CHANNEL_COUNT: usize = 4;

/// The place of a channel in the order in which transfers end.
pub const fn channel(tier: Tier, way: Way) -> usize {
    match (way, tier) {
        (Way::Out, Tier::Ssd) => 0,
        (Way::Out, Tier::Host) => 1,
        (Way::In, Tier::Ssd) => 2,
        (Way::In, Tier::Host) => 3,
    }
}

/// Tier and way of a channel.
const CHANNELS: [(Tier, Way); CHANNEL_COUNT] =
    [(Tier::Ssd, Way::Out), (Tier::Host, Way::Out), (Tier::Ssd, Way::In), (Tier::Host, Way::In)];

/// The rank of a transfer in a queue. Transfers that a kernel waits for go before planned
/// transfers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rank {
    /// True if no kernel waits for it yet.
    pub is_planned: bool,
    /// Lower numbers go first.
    pub priority: f64,
    /// Number of the request, in order.
    pub sequence: u64,
}

impl Eq for Rank {}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        self.is_planned
            .cmp(&other.is_planned)
            .then(self.priority.total_cmp(&other.priority))
            .then(self.sequence.cmp(&other.sequence))
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// One transfer on its way.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    tensor: u32,
    /// Bytes left of it at `since`, latency included, and their rate.
    left_bytes: f64,
    rate: f64,
    since: f64,
    /// When it ends if the rate stays.
    end: f64,
}

/// The channels with their queues.
#[derive(Clone, Debug, Default)]
pub struct Channels {
    running: [Option<Transfer>; CHANNEL_COUNT],
    queues: [BTreeSet<(Rank, u32)>; CHANNEL_COUNT],
    sequence: u64,
    /// Seconds for which each channel has carried a transfer.
    busy_s: [f64; CHANNEL_COUNT],
    moved_bytes: [u64; CHANNEL_COUNT],
}

impl Channels {
    /// Puts a tensor into a queue, behind its equals.
    pub fn push(&mut self, to: usize, tensor: u32, is_planned: bool, priority: f64) -> Rank {
        self.sequence += 1;
        let rank = Rank { is_planned, priority, sequence: self.sequence };
        self.queues[to].insert((rank, tensor));
        rank
    }

    /// Takes a tensor out of a queue.
    pub fn remove(&mut self, from: usize, rank: Rank, tensor: u32) {
        let was_there = self.queues[from].remove(&(rank, tensor));
        debug_assert!(was_there, "tensor {tensor} was not in queue {from}");
    }

    /// The tensors that wait for a channel, in the order of their ranks.
    pub fn queue(&self, of: usize) -> impl Iterator<Item = (Rank, u32)> + '_ {
        self.queues[of].iter().copied()
    }

    /// Returns true if a channel carries nothing.
    pub fn is_idle(&self, on: usize) -> bool {
        self.running[on].is_none()
    }

    /// The tensor that a channel carries.
    pub fn carries(&self, on: usize) -> Option<u32> {
        self.running[on].map(|transfer| transfer.tensor)
    }

    /// Seconds until the transfer of a channel ends, 0 if it carries nothing.
    pub fn busy_for(&self, on: usize, now: f64) -> f64 {
        self.running[on].map_or(0.0, |transfer| transfer.end - now)
    }

    /// Seconds for which a channel has carried transfers, up to the end of the last.
    pub fn busy_seconds(&self, on: usize) -> f64 {
        self.busy_s[on]
    }

    /// Begins a transfer on an idle channel.
    pub fn start(&mut self, on: usize, tensor: u32, bytes: u64, machine: &Machine, now: f64) {
        debug_assert!(self.is_idle(on), "channel {on} carries something");
        let (tier, way) = CHANNELS[on];
        let rate = self.rate(tier, way, machine);
        let left_bytes = machine.charged_bytes(tier, bytes) + machine.latency_s * rate;
        let end = now + left_bytes / rate;
        self.running[on] = Some(Transfer { tensor, left_bytes, rate, since: now, end });
        self.moved_bytes[on] += bytes;
        self.share(machine, now);
    }

    /// Bytes of the transfers that each channel has begun.
    pub fn moved_bytes(&self) -> [u64; CHANNEL_COUNT] {
        self.moved_bytes
    }

    /// The share of its speed that computing has beside the running transfers.
    pub fn speed(&self, machine: &Machine) -> f64 {
        let running = self.running.iter().zip(CHANNELS);
        let lost: f64 = running
            .filter_map(|(transfer, (_, way))| {
                Some(transfer.as_ref()?.rate * machine.price.of(way))
            })
            .sum();
        // Computing goes on at any price, because a price is measured at a moderate rate.
        (1.0 - lost).max(SPEED_MIN)
    }

    /// The transfers that end at `now`, in the order of the channels.
    pub fn take_ended(&mut self, machine: &Machine, now: f64) -> [Option<u32>; CHANNEL_COUNT] {
        let mut ended = [None; CHANNEL_COUNT];
        for (on, slot) in ended.iter_mut().enumerate() {
            if let Some(transfer) = self.running[on].filter(|transfer| transfer.end <= now) {
                self.running[on] = None;
                self.busy_s[on] += now - transfer.since;
                *slot = Some(transfer.tensor);
            }
        }
        self.share(machine, now);
        ended
    }

    /// The time at which the next transfer ends.
    pub fn next_end(&self) -> f64 {
        self.running.iter().flatten().fold(f64::INFINITY, |first, transfer| first.min(transfer.end))
    }

    /// The rate of a transfer now.
    fn rate(&self, tier: Tier, way: Way, machine: &Machine) -> f64 {
        let is_busy = |way| !self.is_idle(channel(Tier::Ssd, way));
        let rate = machine.rate(tier, way, is_busy(way));
        match (tier, way) {
            (Tier::Ssd, Way::Out) if is_busy(Way::In) => rate * machine.duplex_share,
            (Tier::Ssd, Way::In) if is_busy(Way::Out) => rate * machine.duplex_share,
            _ => rate,
        }
    }

    /// Gives each transfer the rate that the others leave it now.
    fn share(&mut self, machine: &Machine, now: f64) {
        for (on, (tier, way)) in CHANNELS.into_iter().enumerate() {
            let rate = self.rate(tier, way, machine);
            let Some(transfer) = &mut self.running[on] else { continue };
            // Equal rates come from the same expression, so their bits are equal.
            if rate.to_bits() != transfer.rate.to_bits() {
                self.busy_s[on] += now - transfer.since;
                transfer.left_bytes -= (now - transfer.since) * transfer.rate;
                transfer.rate = rate;
                transfer.since = now;
                transfer.end = now + transfer.left_bytes.max(0.0) / rate;
            }
        }
    }
}
