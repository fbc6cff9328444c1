//! The tensors that one thread saved and that have not been given to the disk.
//!
//! A saved tensor waits until the thread has passed its node, that is, until the thread makes a
//! node with a higher number. Tensors then go to the disk in batches, because waking the disk's
//! thread costs more than all else. The gate also keeps a reserve, which is written only if room is
//! short.

use std::mem;

/// Number of nodes after which a tensor waits for no batch any more: little may follow it by plan.
const NODES_MAX: i64 = 32;
/// Number of tensors in a reserve at which the dead ones are forgotten for the first time.
const FORGET_AT_MIN: usize = 1024;

/// A tensor that waits, with the number of its node and its size.
#[derive(Debug, PartialEq, Eq)]
pub struct Waiting<T> {
    /// The tensor.
    pub item: T,
    /// The number of the node after the node that saved it: passed nodes have lower numbers.
    pub sequence: i64,
    /// Bytes to write.
    pub nbytes: u64,
}

/// The tensors that one thread saved, in the order of packing.
#[derive(Debug)]
pub struct Gate<T> {
    waiting: Vec<Waiting<T>>,
    nbytes: u64,
    reserve: Vec<Waiting<T>>,
    /// The node of the tensor that came to the reserve last.
    last_reserved: i64,
    passed_sequence: i64,
    look_at: usize,
}

impl<T> Default for Gate<T> {
    fn default() -> Self {
        let (waiting, reserve) = (Vec::new(), Vec::new());
        let (last_reserved, passed_sequence) = (0, 0);
        let look_at = FORGET_AT_MIN;
        Self { waiting, nbytes: 0, reserve, last_reserved, passed_sequence, look_at }
    }
}

impl<T> Gate<T> {
    /// Takes a tensor that is written once its node has been passed.
    pub fn add(&mut self, entry: Waiting<T>) {
        self.nbytes += entry.nbytes;
        self.waiting.push(entry);
    }

    /// Returns true if enough waits for a batch, or the first waits for long, and the first node
    /// has been passed. Without a `sequence` the thread has passed all nodes, and any amount is
    /// enough.
    pub fn may_open(&self, sequence: Option<i64>, batch_bytes: u64) -> bool {
        let is_time = |first: &Waiting<T>| match sequence {
            Some(sequence) => {
                let is_batch = self.nbytes >= batch_bytes || first.sequence + NODES_MAX <= sequence;
                is_batch && first.sequence < sequence
            }
            None => true,
        };
        self.waiting.first().is_some_and(is_time)
    }

    /// Takes all waiting tensors out, in the order of packing.
    pub fn take(&mut self) -> Vec<Waiting<T>> {
        self.nbytes = 0;
        mem::take(&mut self.waiting)
    }

    /// Puts back tensors that go on waiting, before the tensors that came meanwhile.
    pub fn put_back(&mut self, mut staying: Vec<Waiting<T>>) {
        self.nbytes += staying.iter().map(|entry| entry.nbytes).sum::<u64>();
        staying.append(&mut self.waiting);
        self.waiting = staying;
    }

    /// Takes a tensor that is written only if room is short. Now and then it removes the dead
    /// tensors from the reserve and returns them.
    pub fn add_to_reserve(
        &mut self,
        entry: Waiting<T>,
        is_dead: impl Fn(&T) -> bool,
    ) -> Vec<Waiting<T>> {
        let mut dead = Vec::new();
        if self.reserve.len() >= self.look_at {
            dead.extend(self.reserve.extract_if(.., |entry| is_dead(&entry.item)));
            self.look_at = FORGET_AT_MIN.max(2 * self.reserve.len());
        }
        self.last_reserved = entry.sequence;
        self.reserve.push(entry);
        dead
    }

    /// Returns true if the reserve holds tensors.
    pub fn has_reserve(&self) -> bool {
        !self.reserve.is_empty()
    }

    /// Takes the reserve out.
    pub fn take_reserve(&mut self) -> Vec<Waiting<T>> {
        mem::take(&mut self.reserve)
    }

    /// Puts back the tensors of the reserve that were not written, before those that came
    /// meanwhile.
    pub fn put_back_reserve(&mut self, mut rest: Vec<Waiting<T>>) {
        rest.append(&mut self.reserve);
        self.reserve = rest;
    }

    /// Notes that the thread has passed all nodes before this number; kept for the reserve.
    pub fn note_passed(&mut self, sequence: i64) {
        self.passed_sequence = sequence;
    }

    /// The number that [`note_passed`](Self::note_passed) noted last.
    pub fn passed_sequence(&self) -> i64 {
        self.passed_sequence
    }

    /// Returns true if more may be written after the thread has passed another node.
    pub fn is_waiting(&self) -> bool {
        let is_passed = self.reserve.is_empty() || self.last_reserved < self.passed_sequence;
        !self.waiting.is_empty() || !is_passed
    }

    /// Returns true if the gate holds a tensor that can still be written.
    pub fn is_needed(&self, is_dead: impl Fn(&T) -> bool) -> bool {
        !self.waiting.is_empty() || self.reserve.iter().any(|entry| !is_dead(&entry.item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn waiting(item: u32, sequence: i64) -> Waiting<u32> {
        Waiting { item, sequence, nbytes: MIB }
    }

    fn items(waiting: &[Waiting<u32>]) -> Vec<u32> {
        waiting.iter().map(|entry| entry.item).collect()
    }

    #[test]
    fn a_gate_opens_for_a_batch_whose_first_node_was_passed() {
        let mut gate = Gate::default();
        assert!(!gate.may_open(Some(9), 0), "nothing waits");
        gate.add(waiting(1, 5));
        gate.add(waiting(2, 6));
        assert!(!gate.may_open(Some(9), 3 * MIB), "no batch yet");
        gate.add(waiting(3, 7));
        assert!(!gate.may_open(Some(5), 3 * MIB), "the first node is being made");
        assert!(gate.may_open(Some(6), 3 * MIB));
        assert!(gate.may_open(None, 100 * MIB), "a backward has passed all, however few they are");
        assert!(!gate.may_open(Some(4 + NODES_MAX), 4 * MIB));
        assert!(gate.may_open(Some(5 + NODES_MAX), 4 * MIB), "no batch comes together");
    }

    #[test]
    fn a_node_that_saves_thousands_is_looked_at_once_it_is_passed() {
        let mut gate = Gate::default();
        for item in 0..2000 {
            gate.add(waiting(item, 5));
            assert!(!gate.may_open(Some(5), MIB));
        }
        assert!(gate.may_open(Some(6), MIB));
        assert_eq!(gate.take().len(), 2000);
        assert!(!gate.may_open(None, 0));
    }

    #[test]
    fn tensors_that_are_put_back_stay_before_later_tensors() {
        let mut gate = Gate::default();
        gate.add(waiting(1, 5));
        gate.add(waiting(2, 6));
        let mut taken = gate.take();
        gate.add(waiting(3, 7));
        assert!(!gate.may_open(Some(8), 2 * MIB), "what was taken out counts no more");
        taken.remove(0);
        gate.put_back(taken);
        assert!(!gate.may_open(Some(6), 2 * MIB));
        assert!(gate.may_open(Some(7), 2 * MIB));
        assert_eq!(items(&gate.take()), [2, 3]);
    }

    #[test]
    fn a_reserve_forgets_the_dead_and_keeps_its_order() {
        let mut gate = Gate::default();
        for item in 0..FORGET_AT_MIN as u32 {
            assert!(gate.add_to_reserve(waiting(item, 1), |_| true).is_empty());
        }
        let dead = gate.add_to_reserve(waiting(7, 1), |item| *item >= 2);
        assert_eq!(dead.len(), FORGET_AT_MIN - 2);
        let mut taken = gate.take_reserve();
        assert!(!gate.has_reserve());
        gate.add_to_reserve(waiting(8, 1), |_| false);
        taken.remove(1);
        gate.put_back_reserve(taken);
        assert_eq!(items(&gate.take_reserve()), [0, 7, 8]);
    }

    #[test]
    fn a_gate_waits_until_its_thread_has_passed_its_nodes() {
        let mut gate = Gate::default();
        assert!(!gate.is_waiting());
        gate.add_to_reserve(waiting(1, 5), |_| false);
        assert!(gate.is_waiting());
        gate.note_passed(6);
        assert!(!gate.is_waiting(), "the reserve may be written when room is short");
        gate.add(waiting(2, 6));
        assert!(gate.is_waiting());
    }

    #[test]
    fn a_gate_is_needed_as_long_as_something_in_it_lives() {
        let mut gate = Gate::default();
        assert!(!gate.is_needed(|_| false));
        gate.add_to_reserve(waiting(1, 1), |_| false);
        assert!(gate.is_needed(|_| false));
        assert!(!gate.is_needed(|_| true));
        gate.add(waiting(2, 1));
        assert!(gate.is_needed(|_| true), "what waits is looked at when it is written");
    }
}
