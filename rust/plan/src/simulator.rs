//! Plays a trace on a machine while a director moves tensors; it judges every plan, ours included.
//!
//! What falls on one instant is taken in a fixed order: transfers end, the kernel ends and the
//! director speaks, the next kernel waits, room is made, transfers start, the kernel starts. What a
//! director leaves out is fetched on demand, and evicted by least recent use: a bad plan is slow,
//! never wrong.

use crate::channels::{Channels, Rank, channel};
use crate::machine::{Machine, Tier, Way};
use crate::moves::{Action, Move, Plan};
use crate::timeline::{Stall, Stuck, Timeline};
use crate::trace::{CLASS_COUNT, Places, Trace};
use std::collections::VecDeque;

/// Where a tensor is. There are no copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A local outside its life.
    Nowhere,
    /// In the device's memory.
    Device,
    /// On its way to a tier.
    Leaving(Tier),
    /// In a tier.
    Away(Tier),
    /// On its way back from a tier.
    Coming(Tier),
}

/// Who decides what is moved.
pub trait Director {
    /// The moves asked for at the end of a kernel, counted from the first step on.
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>);
}

impl<T: Director> Director for &mut T {
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>) {
        (**self).moves_after(kernel, world, moves);
    }
}

impl Director for &Plan {
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>) {
        moves.extend_from_slice(self.after(kernel % world.trace.kernels().len()));
    }
}

/// The device, its tiers and its channels at one instant.
#[derive(Clone, Debug)]
pub struct World<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    channels: Channels,
    places: Vec<Place>,
    /// The queue that a tensor stands in. It cannot stand in two.
    queued: Vec<Option<(usize, Rank)>>,
    /// When a tensor was last used or came back.
    stamps: Vec<f64>,
    /// Stamps as they were given, the oldest first, with those that were renewed since.
    recent: VecDeque<(f64, u32)>,
    /// The kernel that last waited for a tensor, plus 1.
    wanted_by: Vec<usize>,
    now: f64,
    used_bytes: u64,
    used_by_class: [u64; CLASS_COUNT],
    host_used_bytes: u64,
    /// What is moving out or queued to.
    leaving_bytes: u64,
    /// What the waiting kernel still has to be given room for.
    need_bytes: u64,
    /// The kernel that waits or runs, counted from the first step on.
    kernel: usize,
    is_waiting: bool,
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, machine: &'a Machine) -> Self {
        let places = trace
            .tensors()
            .iter()
            .map(|one| if one.is_global { Place::Away(Tier::Ssd) } else { Place::Nowhere })
            .collect::<Vec<_>>();
        let count = places.len();
        Self {
            trace,
            machine,
            channels: Channels::default(),
            places,
            queued: vec![None; count],
            stamps: vec![-1.0; count],
            recent: VecDeque::new(),
            wanted_by: vec![0; count],
            now: 0.0,
            used_bytes: 0,
            used_by_class: [0; CLASS_COUNT],
            host_used_bytes: 0,
            leaving_bytes: 0,
            need_bytes: 0,
            kernel: 0,
            is_waiting: false,
        }
    }

    /// Seconds since the first step began.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Where a tensor is.
    pub fn place(&self, tensor: u32) -> Place {
        self.places[tensor as usize]
    }

    /// Whether a tensor waits for a channel, in either direction.
    pub fn is_queued(&self, tensor: u32) -> bool {
        self.queued[tensor as usize].is_some()
    }

    /// Bytes in the device's memory.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes in the host's memory.
    pub fn host_used_bytes(&self) -> u64 {
        self.host_used_bytes
    }

    /// Bytes moving out, or queued to.
    pub fn leaving_bytes(&self) -> u64 {
        self.leaving_bytes
    }

    /// The channels and their queues.
    pub fn channels(&self) -> &Channels {
        &self.channels
    }

    fn bytes(&self, tensor: u32) -> u64 {
        self.trace.tensors()[tensor as usize].bytes
    }

    fn take(&mut self, tensor: u32) {
        let one = &self.trace.tensors()[tensor as usize];
        self.used_bytes += one.bytes;
        self.used_by_class[one.class as usize] += one.bytes;
    }

    fn give_back(&mut self, tensor: u32) {
        let one = &self.trace.tensors()[tensor as usize];
        self.used_bytes -= one.bytes;
        self.used_by_class[one.class as usize] -= one.bytes;
    }

    fn step_kernel(&self) -> usize {
        self.kernel % self.trace.kernels().len()
    }

    fn uses(&self) -> &'a [u32] {
        &self.trace.kernels()[self.step_kernel()].uses
    }

    fn is_wanted(&self, tensor: u32) -> bool {
        self.is_waiting && self.wanted_by[tensor as usize] == self.kernel + 1
    }

    // --- queues ---------------------------------------------------------------

    fn enqueue(&mut self, on: usize, tensor: u32, is_planned: bool, priority: f64) {
        debug_assert!(self.queued[tensor as usize].is_none(), "tensor {tensor} is queued twice");
        let rank = self.channels.push(on, tensor, is_planned, priority);
        self.queued[tensor as usize] = Some((on, rank));
    }

    fn dequeue(&mut self, tensor: u32) {
        if let Some((on, rank)) = self.queued[tensor as usize].take() {
            self.channels.remove(on, rank, tensor);
        }
    }

    fn queue_eviction(&mut self, tensor: u32, tier: Tier, is_planned: bool, priority: f64) {
        self.leaving_bytes += self.bytes(tensor);
        self.enqueue(channel(tier, Way::Out), tensor, is_planned, priority);
    }

    fn cancel_eviction(&mut self, tensor: u32) {
        self.leaving_bytes -= self.bytes(tensor);
        self.dequeue(tensor);
    }

    fn issue(&mut self, one: &Move) {
        let is_queued = self.is_queued(one.tensor);
        match (one.action, self.place(one.tensor)) {
            (Action::Evict(tier), Place::Device) if !is_queued => {
                self.queue_eviction(one.tensor, tier, true, one.priority);
            }
            (Action::Fetch, Place::Device) if is_queued => self.cancel_eviction(one.tensor),
            (Action::Fetch, Place::Away(tier) | Place::Leaving(tier)) if !is_queued => {
                self.enqueue(channel(tier, Way::In), one.tensor, true, one.priority);
            }
            // A move that does not fit what is the case is passed over.
            _ => {}
        }
    }

    fn demand(&mut self, tensor: u32) {
        if let Place::Away(tier) = self.place(tensor) {
            self.need_bytes += self.bytes(tensor);
            self.dequeue(tensor);
            self.enqueue(channel(tier, Way::In), tensor, false, 0.0);
        }
    }

    // --- one instant ----------------------------------------------------------

    fn end_transfers(&mut self) {
        for tensor in self.channels.take_ended(self.machine, self.now).into_iter().flatten() {
            let bytes = self.bytes(tensor);
            match self.place(tensor) {
                Place::Leaving(tier) => {
                    self.give_back(tensor);
                    self.leaving_bytes -= bytes;
                    self.places[tensor as usize] = Place::Away(tier);
                    if self.is_wanted(tensor) {
                        self.demand(tensor);
                    }
                }
                Place::Coming(tier) => {
                    if tier == Tier::Host {
                        self.host_used_bytes -= bytes;
                    }
                    self.places[tensor as usize] = Place::Device;
                    self.touch(tensor);
                }
                place => unreachable!("a transfer moved tensor {tensor}, which is {place:?}"),
            }
        }
    }

    fn end_kernel(&mut self) {
        for &tensor in self.uses() {
            self.touch(tensor);
        }
        for &tensor in self.trace.deaths(self.step_kernel()) {
            debug_assert_eq!(self.place(tensor), Place::Device, "tensor {tensor} dies elsewhere");
            self.give_back(tensor);
            self.places[tensor as usize] = Place::Nowhere;
        }
    }

    fn begin_waiting(&mut self, kernel: usize) {
        self.kernel = kernel;
        self.is_waiting = true;
        self.need_bytes = 0;
        for &tensor in self.uses() {
            self.wanted_by[tensor as usize] = kernel + 1;
            match self.place(tensor) {
                Place::Nowhere => self.need_bytes += self.bytes(tensor),
                Place::Device if self.is_queued(tensor) => self.cancel_eviction(tensor),
                Place::Away(_) => self.demand(tensor),
                _ => {}
            }
        }
    }

    /// Let the waiting kernel start if everything is there. Whether it did.
    fn try_start_kernel(&mut self) -> bool {
        let is_ready = self.is_waiting
            && self.used_bytes + self.need_bytes <= self.machine.device_bytes
            && self
                .uses()
                .iter()
                .all(|&one| matches!(self.place(one), Place::Device | Place::Nowhere));
        if is_ready {
            for &tensor in self.trace.births(self.step_kernel()) {
                self.places[tensor as usize] = Place::Device;
                self.take(tensor);
            }
            self.need_bytes = 0;
            self.is_waiting = false;
        }
        is_ready
    }

    /// Make room and start transfers until nothing changes.
    fn settle(&mut self) {
        loop {
            let mut has_changed = self.is_waiting && self.make_room();
            has_changed |= self.start_evictions();
            has_changed |= self.start_fetches();
            if !has_changed {
                return;
            }
        }
    }

    fn make_room(&mut self) -> bool {
        let own: u64 = self
            .uses()
            .iter()
            .filter(|&&one| matches!(self.place(one), Place::Leaving(_)))
            .map(|&one| self.bytes(one))
            .sum();
        let mut has_changed = false;
        while self.used_bytes + self.need_bytes
            > self.machine.device_bytes + (self.leaving_bytes - own)
        {
            let Some(tensor) = self.least_recent() else { break };
            let Some(tier) = self.refuge(tensor) else { break };
            self.queue_eviction(tensor, tier, false, 0.0);
            has_changed = true;
        }
        has_changed
    }

    /// The tensor that was not used for longest among those that may leave now; of several with one
    /// stamp the one with the lowest number.
    fn least_recent(&mut self) -> Option<u32> {
        // What was used again, or left, has a newer entry or will have one when it is back.
        while let Some(&(stamp, tensor)) = self.recent.front() {
            let is_newest = self.stamps[tensor as usize].to_bits() == stamp.to_bits();
            if is_newest && self.place(tensor) == Place::Device {
                break;
            }
            self.recent.pop_front();
        }
        let mut found: Option<(f64, u32)> = None;
        for &(stamp, tensor) in &self.recent {
            if found.is_some_and(|oldest| stamp > oldest.0) {
                break;
            }
            let may_leave = self.stamps[tensor as usize].to_bits() == stamp.to_bits()
                && self.place(tensor) == Place::Device
                && !self.is_queued(tensor)
                && !self.is_wanted(tensor)
                && self.refuge(tensor).is_some();
            if may_leave && found.is_none_or(|oldest| tensor < oldest.1) {
                found = Some((stamp, tensor));
            }
        }
        found.map(|(_, tensor)| tensor)
    }

    /// Note that a tensor is used, or has come back.
    fn touch(&mut self, tensor: u32) {
        self.stamps[tensor as usize] = self.now;
        if self.trace.tensors()[tensor as usize].places != Places::NONE {
            self.recent.push_back((self.now, tensor));
        }
    }

    /// Where a tensor goes when room is made: to the host if it fits there.
    fn refuge(&self, tensor: u32) -> Option<Tier> {
        let places = self.trace.tensors()[tensor as usize].places;
        let fits = self.host_used_bytes + self.bytes(tensor) <= self.machine.host_bytes;
        if fits && places.host {
            return Some(Tier::Host);
        }
        Some(Tier::Ssd).filter(|_| places.ssd)
    }

    fn start_evictions(&mut self) -> bool {
        let (ssd, host) = (channel(Tier::Ssd, Way::Out), channel(Tier::Host, Way::Out));
        let mut has_changed = self.start_first_eviction(Tier::Ssd);
        while self.channels.is_idle(host) {
            let Some((rank, tensor)) = self.channels.queue(host).next() else { break };
            if self.host_used_bytes + self.bytes(tensor) <= self.machine.host_bytes {
                has_changed |= self.start_first_eviction(Tier::Host);
                break;
            }
            if !self.trace.tensors()[tensor as usize].places.ssd {
                self.cancel_eviction(tensor);
                has_changed = true;
                continue;
            }
            // The host is full: the drives take it, and at once if they have nothing to do.
            self.dequeue(tensor);
            self.enqueue(ssd, tensor, rank.is_planned, rank.priority);
            self.start_first_eviction(Tier::Ssd);
            has_changed = true;
        }
        has_changed
    }

    fn start_first_eviction(&mut self, tier: Tier) -> bool {
        let on = channel(tier, Way::Out);
        let first = self.channels.queue(on).next().filter(|_| self.channels.is_idle(on));
        if let Some((_, tensor)) = first {
            self.dequeue(tensor);
            if tier == Tier::Host {
                self.host_used_bytes += self.bytes(tensor);
            }
            self.places[tensor as usize] = Place::Leaving(tier);
            self.channels.start(on, tensor, self.bytes(tensor), self.machine, self.now);
        }
        first.is_some()
    }

    fn start_fetches(&mut self) -> bool {
        let mut has_changed = false;
        for tier in Tier::ALL {
            let on = channel(tier, Way::In);
            if !self.channels.is_idle(on) {
                continue;
            }
            let first = self
                .channels
                .queue(on)
                .map(|(_, tensor)| tensor)
                .find(|&one| matches!(self.place(one), Place::Away(_)));
            let Some(tensor) = first else { continue };
            let bytes = self.bytes(tensor);
            let is_wanted = self.is_wanted(tensor);
            let reserved = if is_wanted { 0 } else { self.need_bytes };
            if self.used_bytes + reserved + bytes > self.machine.device_bytes {
                continue;
            }
            self.dequeue(tensor);
            self.need_bytes -= if is_wanted { bytes } else { 0 };
            self.take(tensor);
            self.places[tensor as usize] = Place::Coming(tier);
            self.channels.start(on, tensor, bytes, self.machine, self.now);
            has_changed = true;
        }
        has_changed
    }
}

/// Play some steps. `seconds` has the time of each kernel, which may differ from the trace's.
pub fn run(
    trace: &Trace,
    machine: &Machine,
    seconds: &[f64],
    step_count: usize,
    mut director: impl Director,
) -> Result<Timeline, Stuck> {
    let kernel_count = seconds.len();
    let mut world = World::new(trace, machine);
    let mut timeline = Timeline::new(kernel_count, step_count);
    let mut moves = Vec::new();
    let mut waiting_since = 0.0;
    let mut kernel_end = f64::INFINITY;
    // What is left of the running kernel at full speed, once bytes have moved beside it.
    let mut kernel_left_s: Option<f64> = None;
    let mut last_arrival = None;
    world.begin_waiting(0);
    loop {
        world.settle();
        if world.is_waiting {
            let blamed = world
                .uses()
                .iter()
                .find(|&&one| !matches!(world.place(one), Place::Device | Place::Nowhere));
            last_arrival = blamed.copied().or(last_arrival);
            if world.try_start_kernel() {
                let stall_s = world.now - waiting_since;
                timeline.start(world.now, Stall { seconds: stall_s, tensor: last_arrival });
                kernel_end = world.now + seconds[world.step_kernel()];
            }
        }
        timeline.resident(world.now, world.used_bytes, world.used_by_class, world.host_used_bytes);
        let speed = if machine.has_price() { world.channels.speed(machine) } else { 1.0 };
        if kernel_end.is_finite() && (speed < 1.0 || kernel_left_s.is_some()) {
            let left_s = kernel_left_s.unwrap_or(kernel_end - world.now);
            kernel_left_s = Some(left_s);
            kernel_end = world.now + left_s / speed;
        }
        let now = world.channels.next_end().min(kernel_end);
        if !now.is_finite() {
            return Err(Stuck { kernel: world.step_kernel(), need_bytes: world.need_bytes });
        }
        if let Some(left_s) = &mut kernel_left_s {
            *left_s = (*left_s - (now - world.now) * speed).max(0.0);
        }
        world.now = now;
        world.end_transfers();
        if kernel_end <= now {
            kernel_end = f64::INFINITY;
            kernel_left_s = None;
            world.end_kernel();
            timeline.end(now, &world.channels);
            moves.clear();
            director.moves_after(world.kernel, &world, &mut moves);
            for one in &moves {
                world.issue(one);
            }
            if world.kernel + 1 == kernel_count * step_count {
                timeline.close(&world.channels);
                return Ok(timeline);
            }
            waiting_since = now;
            last_arrival = None;
            world.begin_waiting(world.kernel + 1);
        }
    }
}
