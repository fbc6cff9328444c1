//! The device, its tiers and its channels at one instant, and the events of that instant.

use crate::channels::{Channels, Rank, channel};
use crate::given::{Given, Write};
use crate::machine::{Machine, Tier, Way};
use crate::moves::{Action, Move};
use crate::trace::{CLASS_COUNT, Places, Trace};
use std::collections::VecDeque;

/// The place of a tensor. It has no copies.
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

/// The device, its tiers and its channels at one instant.
#[derive(Clone, Debug)]
pub struct World<'a> {
    pub(crate) trace: &'a Trace,
    machine: &'a Machine,
    pub(crate) channels: Channels,
    given: Given,
    places: Vec<Place>,
    /// The queue that a tensor stands in. It cannot stand in two queues.
    queued: Vec<Option<(usize, Rank)>>,
    /// When a tensor was last used or came back.
    stamps: Vec<f64>,
    /// The stamps in the order of their setting, with stamps that were renewed since.
    recent: VecDeque<(f64, u32)>,
    /// Number of the last kernel that waited for a tensor, plus 1.
    wanted_by: Vec<usize>,
    pub(crate) now: f64,
    pub(crate) used_bytes: u64,
    pub(crate) used_by_class: [u64; CLASS_COUNT],
    pub(crate) host_used_bytes: u64,
    /// Bytes of tensors that are moving out, or queued for it.
    leaving_bytes: u64,
    /// Bytes that the waiting kernel still needs room for.
    pub(crate) need_bytes: u64,
    /// The kernel that waits or runs, counted from the first step.
    pub(crate) kernel: usize,
    pub(crate) is_waiting: bool,
}

impl<'a> World<'a> {
    pub(crate) fn new(trace: &'a Trace, machine: &'a Machine) -> Self {
        let places = trace
            .tensors()
            .iter()
            .map(|tensor| if tensor.is_global { Place::Away(Tier::Ssd) } else { Place::Nowhere })
            .collect::<Vec<_>>();
        let count = places.len();
        Self {
            trace,
            machine,
            channels: Channels::default(),
            given: Given::new(count, machine.writeback),
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

    /// The place of a tensor.
    pub fn place(&self, tensor: u32) -> Place {
        self.places[tensor as usize]
    }

    /// Returns true if a tensor waits for a channel, in either direction.
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

    /// Bytes that are moving out, or queued for it.
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
        let entry = &self.trace.tensors()[tensor as usize];
        self.used_bytes += entry.bytes;
        self.used_by_class[entry.class as usize] += entry.bytes;
    }

    fn give_back(&mut self, tensor: u32) {
        let entry = &self.trace.tensors()[tensor as usize];
        self.used_bytes -= entry.bytes;
        self.used_by_class[entry.class as usize] -= entry.bytes;
    }

    pub(crate) fn step_kernel(&self) -> usize {
        self.kernel % self.trace.kernels().len()
    }

    pub(crate) fn uses(&self) -> &'a [u32] {
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
        self.given.forget_fetch(tensor);
        self.leaving_bytes -= self.bytes(tensor);
        self.dequeue(tensor);
    }

    pub(crate) fn issue(&mut self, planned: &Move) {
        let is_queued = self.is_queued(planned.tensor);
        match (planned.action, self.place(planned.tensor)) {
            // A tensor that is on its way to the disk, and was needed meanwhile, is not given
            // twice.
            (Action::Evict(tier), Place::Device)
                if !is_queued && !self.given.has(planned.tensor) =>
            {
                self.queue_eviction(planned.tensor, tier, true, planned.priority);
            }
            (Action::Fetch, Place::Device) if is_queued => {
                if self.machine.writeback.is_some() {
                    self.given.ask_later(planned.tensor, planned.priority);
                } else {
                    self.cancel_eviction(planned.tensor);
                }
            }
            (Action::Fetch, Place::Away(tier) | Place::Leaving(tier)) if !is_queued => {
                self.enqueue(channel(tier, Way::In), planned.tensor, true, planned.priority);
            }
            // A move that does not fit the place of its tensor is skipped.
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

    pub(crate) fn end_transfers(&mut self) {
        let ended = self.channels.take_ended(self.machine, self.now);
        for (on, tensor) in ended.into_iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let bytes = self.bytes(tensor);
            if on == channel(Tier::Ssd, Way::Out) && self.machine.writeback.is_some() {
                self.end_given();
                continue;
            }
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

    pub(crate) fn end_kernel(&mut self) {
        for &tensor in self.uses() {
            self.touch(tensor);
        }
        for &tensor in self.trace.deaths(self.step_kernel()) {
            debug_assert_eq!(self.place(tensor), Place::Device, "tensor {tensor} dies elsewhere");
            // A write that is under way still needs the memory.
            if !self.given.drop_tensor(tensor) {
                self.give_back(tensor);
            }
            self.places[tensor as usize] = Place::Nowhere;
        }
    }

    pub(crate) fn begin_waiting(&mut self, kernel: usize) {
        self.kernel = kernel;
        self.is_waiting = true;
        self.need_bytes = 0;
        for &tensor in self.uses() {
            self.wanted_by[tensor as usize] = kernel + 1;
            match self.place(tensor) {
                Place::Nowhere => self.need_bytes += self.bytes(tensor),
                Place::Device if self.is_queued(tensor) => self.cancel_eviction(tensor),
                Place::Away(_) => self.demand(tensor),
                Place::Leaving(Tier::Ssd) if self.machine.writeback.is_some() => {
                    self.forward(tensor);
                }
                _ => {}
            }
        }
        self.free_written();
    }

    /// Starts the waiting kernel if all its tensors are there. Returns true if it did.
    pub(crate) fn try_start_kernel(&mut self) -> bool {
        let is_ready = self.is_waiting
            && self.used_bytes + self.need_bytes <= self.machine.device_bytes
            && self
                .uses()
                .iter()
                .all(|&tensor| matches!(self.place(tensor), Place::Device | Place::Nowhere));
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

    /// Makes room and starts transfers until nothing changes.
    pub(crate) fn settle(&mut self) {
        loop {
            let is_short = self.used_bytes + self.need_bytes > self.machine.device_bytes;
            let mut has_changed = self.is_waiting && is_short && self.free_written();
            has_changed |= self.is_waiting && self.make_room();
            has_changed |= self.start_evictions();
            has_changed |= self.start_fetches();
            if !has_changed {
                return;
            }
        }
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
            // The host is full, so the drives take the tensor, at once if they are idle.
            self.dequeue(tensor);
            self.enqueue(ssd, tensor, rank.is_planned, rank.priority);
            self.start_first_eviction(Tier::Ssd);
            has_changed = true;
        }
        has_changed
    }

    fn start_first_eviction(&mut self, tier: Tier) -> bool {
        if let (Tier::Ssd, Some(writeback)) = (tier, self.machine.writeback) {
            return self.give_writes(writeback.in_flight_bytes);
        }
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
                .find(|&tensor| matches!(self.place(tensor), Place::Away(_)));
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

    fn make_room(&mut self) -> bool {
        let own: u64 = self
            .uses()
            .iter()
            .filter(|&&tensor| matches!(self.place(tensor), Place::Leaving(_)))
            .map(|&tensor| self.bytes(tensor))
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

    /// The tensor that was not used for longest, of those that may leave now; of equal stamps, the
    /// tensor with the lowest number.
    fn least_recent(&mut self) -> Option<u32> {
        // A tensor that was used again, or left, has a newer entry or gets a newer entry when it is
        // back.
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
                && !self.given.has(tensor)
                && !self.is_wanted(tensor)
                && self.refuge(tensor).is_some();
            if may_leave && found.is_none_or(|oldest| tensor < oldest.1) {
                found = Some((stamp, tensor));
            }
        }
        found.map(|(_, tensor)| tensor)
    }

    /// Notes that a tensor is used, or has come back.
    fn touch(&mut self, tensor: u32) {
        self.stamps[tensor as usize] = self.now;
        if self.trace.tensors()[tensor as usize].places != Places::NONE {
            self.recent.push_back((self.now, tensor));
        }
    }

    /// The tier for a tensor that makes room: the host if it fits there.
    fn refuge(&self, tensor: u32) -> Option<Tier> {
        let places = self.trace.tensors()[tensor as usize].places;
        let fits = self.host_used_bytes + self.bytes(tensor) <= self.machine.host_bytes;
        if fits && places.host {
            return Some(Tier::Host);
        }
        Some(Tier::Ssd).filter(|_| places.ssd)
    }

    // --- writes of a session ----------------------------------------------------

    /// Gives queued writes to the disk until `in_flight_bytes` are under way.
    fn give_writes(&mut self, in_flight_bytes: u64) -> bool {
        let on = channel(Tier::Ssd, Way::Out);
        let mut has_changed = false;
        while self.given.has_room(in_flight_bytes) {
            let Some((_, tensor)) = self.channels.queue(on).next() else { break };
            self.dequeue(tensor);
            self.places[tensor as usize] = Place::Leaving(Tier::Ssd);
            if let Some(priority) = self.given.begin(tensor, self.bytes(tensor)) {
                self.enqueue(channel(Tier::Ssd, Way::In), tensor, true, priority);
            }
            has_changed = true;
        }
        if self.channels.is_idle(on)
            && let Some(&Write { tensor, bytes, .. }) = self.given.first()
        {
            self.channels.start(on, tensor, bytes, self.machine, self.now);
            has_changed = true;
        }
        has_changed
    }

    /// Ends the oldest write.
    fn end_given(&mut self) {
        let Some(write) = self.given.end() else { return };
        self.leaving_bytes -= write.bytes;
        if write.is_dropped {
            self.give_back(write.tensor);
        }
    }

    /// Uses a tensor on its way to the disk from memory.
    fn forward(&mut self, tensor: u32) {
        self.dequeue(tensor);
        self.places[tensor as usize] = Place::Device;
    }

    /// Frees the memory of tensors that have reached the disk. Returns true if there were any.
    fn free_written(&mut self) -> bool {
        let mut has_changed = false;
        for tensor in self.given.take_unfreed() {
            // A tensor that was needed meanwhile stays.
            if self.place(tensor) == Place::Leaving(Tier::Ssd) {
                self.give_back(tensor);
                self.places[tensor as usize] = Place::Away(Tier::Ssd);
                has_changed = true;
            }
        }
        has_changed
    }
}
