//! What is packed between two backwards, and in which order it is asked for.
//!
//! A *round* is one micro-batch, or several. Within a backward `PyTorch` runs nodes in the reverse
//! order of their creation and unpacks each node's tensors in the order of packing, so that is the
//! first guess; what a round really did is the guess for the next of the same signature (gradient
//! penalties and partial backwards differ). The order is a hint: a wrong guess costs a stall, never
//! a wrong byte.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use crate::guide::{Along, Place};

/// The phase of what a forward packs; else it is the number of a backward.
pub const FORWARD: i64 = -1;
/// First keys of rounds.
const FORWARD_SEED: i64 = 1;
const BACKWARD_SEED: i64 = 2;
/// A round of so many tensors may be many forwards whose graphs were dropped: look whether it is.
const DEAD_ROUND_COUNT: usize = 4096;

/// One storage of a round, as the plans learn of it. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// The name of the storage.
    pub key: i64,
    /// Its size.
    pub nbytes: u64,
    /// When it was packed.
    pub packed_s: f64,
    /// When the first of its tensors was asked for.
    pub needed_s: f64,
    /// The GPU that it is on; `None`: the CPU.
    pub gpu: Option<usize>,
}

/// A record that a round brought.
#[derive(Debug)]
struct NewRecord {
    key: i64,
    nbytes: u64,
    packed_s: f64,
    gpu: Option<usize>,
}

/// What is packed, as a round takes note of it.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The number of the node that saves it.
    pub sequence: i64,
    /// Its size.
    pub nbytes: u64,
    /// The GPU that it is on; `None`: the CPU.
    pub gpu: Option<usize>,
    /// Whether it brought a record of its own.
    pub is_new: bool,
}

/// What a plan says about the reads of a round, on the clock of the round that it was made from.
#[derive(Debug, Default)]
pub struct Plan {
    /// When each storage was needed: how far a later round has come.
    pub needed_s: HashMap<i64, f64>,
    /// When the read of a storage must begin at the latest.
    pub start_by_s: HashMap<i64, f64>,
    /// The longest time between two needs: how late a read may be begun, as needs begin reads.
    pub longest_gap_s: f64,
}

/// The node of a round that saved most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heaviest {
    /// Its bytes.
    pub nbytes: u64,
    /// How many tensors it saved.
    pub tensor_count: u64,
    /// The bytes of all nodes.
    pub all_bytes: u64,
}

/// In which order the tensors of a round are expected back.
#[derive(Debug)]
struct Expected {
    /// Ordinals, the first one first.
    order: Arc<[usize]>,
    /// By ordinal, where it stands in the order.
    position: Vec<Option<usize>>,
    /// Places in the order of what was given to the disk: all that can be read ahead.
    on_disk: Vec<usize>,
}

/// What was packed between two backwards. `E` leads to a saved tensor, which it does not keep
/// alive.
#[derive(Debug)]
pub struct Round<E> {
    phase: i64,
    /// The key of the last tensor: it stands for all that were packed until then.
    signature: i64,
    entries: Vec<E>,
    keys: Vec<i64>,
    sequences: Vec<i64>,
    /// For each entry that brought a record of its own.
    packed: Vec<Option<NewRecord>>,
    /// Ordinals, in the order in which they were asked for first.
    needed: Vec<usize>,
    is_needed: Vec<bool>,
    /// Key of a record to the time when the first of its tensors was asked for.
    record_needed_s: HashMap<i64, f64>,
    expected: Option<Expected>,
    plan: Option<Arc<Plan>>,
    /// How far this round has come, on the clock of its plan.
    progress_s: f64,
    /// The most saved bytes in memory since this round was first asked for a tensor.
    resident_bytes: u64,
    stall_s: f64,
    /// When the first tensor was packed, and when one was asked for last.
    began_s: f64,
    ended_s: f64,
    /// The key of the first tensor: all that is known of a round when it begins.
    opening: i64,
    /// Seconds that its tensors spent in the hooks.
    hooks_s: f64,
    /// Whether it need not see what comes after its first tensor.
    is_skimmed: bool,
    /// Whether it goes on no more.
    is_closed: bool,
    /// Whether nothing tells when its tensors were packed and needed.
    is_untimed: bool,
    /// What it may leave out, and how far it has come.
    along: Along,
    /// At this many entries, look whether the older are dead.
    look_at: usize,
}

/// The key of the tensor of `nbytes` that is packed after the one with `key`.
///
/// Rounds that begin alike have equal keys, so a decision is found before the round is complete.
#[must_use]
pub fn next_key(key: i64, nbytes: u64) -> i64 {
    // The finaliser of splitmix64, which spreads each bit over all.
    let mut mixed = (key as u64).wrapping_add(0x9E37_79B9_7F4A_7C15) ^ nbytes.rotate_left(32);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) as i64
}

impl<E> Round<E> {
    /// An empty round of a phase: the number of a backward, or [`FORWARD`].
    #[must_use]
    pub fn new(phase: i64) -> Self {
        Self {
            phase,
            signature: if phase == FORWARD { FORWARD_SEED } else { BACKWARD_SEED },
            entries: Vec::new(),
            keys: Vec::new(),
            sequences: Vec::new(),
            packed: Vec::new(),
            needed: Vec::new(),
            is_needed: Vec::new(),
            record_needed_s: HashMap::new(),
            expected: None,
            plan: None,
            progress_s: f64::NEG_INFINITY,
            resident_bytes: 0,
            stall_s: 0.0,
            began_s: 0.0,
            ended_s: 0.0,
            opening: 0,
            hooks_s: 0.0,
            is_skimmed: false,
            is_closed: false,
            is_untimed: false,
            along: Along::default(),
            look_at: DEAD_ROUND_COUNT,
        }
    }

    /// The backward in which this was packed, or [`FORWARD`].
    pub fn phase(&self) -> i64 {
        self.phase
    }

    /// What rounds of the same kind have in common.
    pub fn signature(&self) -> i64 {
        self.signature
    }

    /// How many tensors were packed.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was packed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensor that was packed at this place.
    pub fn entry(&self, ordinal: usize) -> &E {
        &self.entries[ordinal]
    }

    /// Whether some tensor was asked for.
    pub fn is_asked_for(&self) -> bool {
        !self.needed.is_empty()
    }

    /// Ordinals, in the order in which they were asked for first.
    pub fn needed(&self) -> &[usize] {
        &self.needed
    }

    /// Enters a packed tensor, to which `entry` leads, and returns its ordinal.
    pub fn add(&mut self, entry: E, of: Entry, now_s: f64) -> usize {
        let Entry { sequence, nbytes, gpu, is_new } = of;
        self.signature = next_key(self.signature, nbytes);
        if self.entries.is_empty() {
            (self.began_s, self.ended_s, self.opening) = (now_s, now_s, self.signature);
        }
        let packed = NewRecord { key: self.signature, nbytes, packed_s: now_s, gpu };
        self.packed.push(is_new.then_some(packed));
        self.keys.push(self.signature);
        self.along.step();
        self.sequences.push(sequence);
        self.is_needed.push(false);
        self.entries.push(entry);
        self.entries.len() - 1
    }

    /// Whether the older of many entries are dead: forwards whose graphs were dropped.
    pub fn is_dead(&mut self, is_dead: impl Fn(&E) -> bool) -> bool {
        if self.entries.len() < self.look_at {
            return false;
        }
        self.look_at = 2 * self.entries.len();
        self.entries[..self.entries.len() / 2].iter().all(is_dead)
    }

    /// Whether every tensor was asked for, or is dead.
    pub fn is_finished(&self, is_dead: impl Fn(&E) -> bool) -> bool {
        self.entries.iter().zip(&self.is_needed).all(|(entry, needed)| *needed || is_dead(entry))
    }

    /// Whether an order is expected; else it is to be predicted before anything is read ahead.
    pub fn is_predicted(&self) -> bool {
        self.expected.is_some()
    }

    /// Expects the order that was learned from a round of the same signature, or the reverse of the
    /// nodes. `is_on_disk` tells what was given to the disk.
    pub fn predict(
        &mut self,
        learned: Option<Arc<[usize]>>,
        plan: Option<Arc<Plan>>,
        is_on_disk: impl Fn(&E) -> bool,
    ) {
        let count = self.entries.len();
        let order = learned.unwrap_or_else(|| {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by_key(|&ordinal| (Reverse(self.sequences[ordinal]), ordinal));
            order.into()
        });
        let mut position = vec![None; count];
        let mut on_disk = Vec::new();
        for (place, &ordinal) in order.iter().enumerate().filter(|(_, ordinal)| **ordinal < count) {
            position[ordinal] = Some(place);
            if is_on_disk(&self.entries[ordinal]) {
                on_disk.push(place);
            }
        }
        self.expected = Some(Expected { order, position, on_disk });
        self.plan = plan;
    }

    /// Notes that a tensor on the record with `key` is asked for.
    pub fn note_needed(&mut self, ordinal: usize, key: i64, now_s: f64) {
        self.ended_s = self.ended_s.max(now_s);
        let is_again = std::mem::replace(&mut self.is_needed[ordinal], true);
        if !is_again {
            self.needed.push(ordinal);
        }
        self.record_needed_s.entry(key).or_insert(now_s);
        if let Some(planned_s) = self.plan.as_ref().and_then(|plan| plan.needed_s.get(&key)) {
            // A second backward over the same graph asks for everything once more.
            self.progress_s = if is_again { *planned_s } else { self.progress_s.max(*planned_s) };
        }
    }

    /// Counts a wait for one of its tensors.
    pub fn note_stall(&mut self, stall_s: f64) {
        self.stall_s += stall_s;
    }

    /// Notes how much is in memory; returns by how much it was more at some time of its backward.
    pub fn note_resident(&mut self, resident_bytes: u64) -> u64 {
        self.resident_bytes = self.resident_bytes.max(resident_bytes);
        self.resident_bytes - resident_bytes
    }

    /// Bytes and tensors of the node that saved most.
    pub fn heaviest_node(&self) -> Heaviest {
        let mut nodes: HashMap<i64, (u64, u64)> = HashMap::new();
        let mut all_bytes = 0;
        for (sequence, packed) in self.sequences.iter().zip(&self.packed) {
            if let Some(one) = packed {
                let node = nodes.entry(*sequence).or_default();
                *node = (node.0 + one.nbytes, node.1 + 1);
                all_bytes += one.nbytes;
            }
        }
        let (nbytes, tensor_count) = nodes.into_values().max().unwrap_or_default();
        Heaviest { nbytes, tensor_count, all_bytes }
    }

    /// What the plans learn from; nothing if nothing tells of times.
    pub fn learned_items(&self) -> Vec<Item> {
        if self.is_untimed {
            return Vec::new();
        }
        let item = |&NewRecord { key, nbytes, packed_s, gpu }: &NewRecord| {
            // Where several threads wait at once, the clock that stands still meanwhile goes back.
            let needed_s = self.record_needed_s.get(&key)?.max(packed_s);
            Some(Item { key, nbytes, packed_s, needed_s, gpu })
        };
        self.packed.iter().flatten().filter_map(item).collect()
    }

    /// Gives nothing to the disk, and need not see what comes after the first tensor: nothing is
    /// learned from this round.
    pub fn skim(&mut self) {
        self.is_skimmed = true;
    }

    /// Whether it need not see what comes after its first tensor.
    pub fn is_skimmed(&self) -> bool {
        self.is_skimmed
    }

    /// Has a guide from now on.
    pub fn begin_guide(&mut self, guide: Arc<[Place]>) {
        self.along.begin(guide);
    }

    /// Where a tensor of `nbytes` that is packed now stands in the guide: if there is one, if
    /// nothing was asked for, and if all went along it so far.
    pub fn guided(&mut self, nbytes: u64) -> Option<Place> {
        if !self.along.has_guide() || self.is_closed || self.is_asked_for() {
            return None;
        }
        self.along.place(next_key(self.signature, nbytes))
    }

    /// Counts a tensor that is not followed.
    pub fn pass(&mut self, nbytes: u64) {
        self.signature = next_key(self.signature, nbytes);
        self.along.pass(nbytes);
    }

    /// Whether it lacks tensors that were not followed: then it teaches nothing of the others.
    pub fn is_partial(&self) -> bool {
        self.along.has_passed()
    }

    /// What it packed, for later rounds of its kind.
    pub fn guide(&self) -> Arc<[Place]> {
        let places = self.keys.iter().zip(&self.packed);
        let place = |(&key, packed): (&i64, &Option<NewRecord>)| Place {
            key,
            is_new: packed.is_some(),
            gpu: packed.as_ref().and_then(|one| one.gpu),
        };
        places.map(place).collect()
    }

    /// Under which name its order is remembered: one that lacks tensors has others in the same
    /// places.
    pub(crate) fn order_name(&self) -> i64 {
        if self.is_partial() {
            return next_key(self.signature, self.entries.len() as u64);
        }
        self.signature
    }

    /// Says that nothing tells when its tensors were packed and needed.
    pub fn set_untimed(&mut self) {
        self.is_untimed = true;
    }

    /// Says whether what is packed next begins another round.
    pub fn set_closed(&mut self, is_closed: bool) {
        self.is_closed = is_closed;
    }

    /// Whether what is packed next begins another round.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Counts the time of a call of a hook.
    pub fn note_hook(&mut self, seconds: f64) {
        self.hooks_s += seconds;
    }

    /// The time of the calls of the hooks, without the waits for the disk.
    pub fn hooks_s(&self) -> f64 {
        self.hooks_s
    }

    /// The key of the first tensor.
    pub fn opening(&self) -> i64 {
        self.opening
    }

    /// When the first tensor was packed, and when one was asked for last.
    pub fn span_s(&self) -> (f64, f64) {
        (self.began_s, self.ended_s)
    }

    /// The waits for its tensors.
    pub fn stall_s(&self) -> f64 {
        self.stall_s
    }

    /// Where a tensor stands in the expected order; `None` for what was packed after its backward
    /// had begun: nothing is known of its place.
    pub fn position(&self, ordinal: usize) -> Option<usize> {
        self.expected.as_ref()?.position.get(ordinal).copied().flatten()
    }

    /// Places in the order of what can be read ahead.
    pub(crate) fn on_disk(&self) -> &[usize] {
        self.expected.as_ref().map_or(&[], |expected| &expected.on_disk)
    }

    /// The ordinal at a place of the order.
    pub(crate) fn at(&self, place: usize) -> usize {
        self.expected.as_ref().map_or(0, |expected| expected.order[place])
    }

    /// Whether by the plan the read of a record should begin before the next need.
    pub(crate) fn is_due(&self, key: i64) -> bool {
        let Some(plan) = &self.plan else { return false };
        let due = |start_s: &f64| *start_s <= self.progress_s + plan.longest_gap_s;
        plan.start_by_s.get(&key).is_some_and(due)
    }
}
