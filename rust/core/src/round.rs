//! The tensors that are packed between two backwards, and the order in which they are asked for.
//!
//! A *round* is one micro-batch, or several. Within a backward `PyTorch` runs nodes in the reverse
//! order of their creation and unpacks each node's tensors in the order of packing. That is the
//! first guess. The order in which a round really asked is the guess for the next round of the same
//! signature (gradient penalties and partial backwards differ). The order is a hint: a wrong guess
//! costs a stall, never a wrong byte.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use crate::guide::{GuideCursor, Place};

/// The phase of tensors that a forward packs. The phase of all others is the number of a backward.
pub const FORWARD: i64 = -1;
/// Keys that a round starts from, before its first tensor.
const FORWARD_SEED: i64 = 1;
const BACKWARD_SEED: i64 = 2;
/// A round of so many tensors may be many forwards whose graphs were dropped; its older tensors are
/// then checked.
const DEAD_ROUND_COUNT: usize = 4096;

/// One storage of a round, from which plans are made. Times are in seconds.
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
    /// The GPU that holds it; `None`: the CPU.
    pub gpu: Option<usize>,
}

/// A record that a tensor of this round opened.
#[derive(Debug)]
struct NewRecord {
    key: i64,
    nbytes: u64,
    packed_s: f64,
    gpu: Option<usize>,
}

/// A packed tensor, as it is entered in a round.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The number of the node that saves the tensor.
    pub sequence: i64,
    /// Its size.
    pub nbytes: u64,
    /// The GPU that holds it; `None`: the CPU.
    pub gpu: Option<usize>,
    /// The key of the record of an earlier tensor with the same bytes; `None`: it opened a record
    /// of its own.
    pub joined: Option<i64>,
    /// True for a narrow copy of the tensor before it. Rounds are of one kind with and without it.
    pub is_narrow: bool,
}

/// A plan for the reads of a round, on the clock of the round that it was made from.
#[derive(Debug, Default)]
pub struct Plan {
    /// When each storage was needed. It tells how far a later round has come.
    pub needed_s: HashMap<i64, f64>,
    /// When the read of a storage must begin at the latest.
    pub start_by_s: HashMap<i64, f64>,
    /// The longest time between two needs. Needs begin reads, so a read may begin this much late.
    pub longest_gap_s: f64,
}

/// The node of a round that saved most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heaviest {
    /// Its bytes.
    pub nbytes: u64,
    /// Number of tensors it saved.
    pub tensor_count: u64,
    /// The bytes of all nodes.
    pub all_bytes: u64,
}

/// The order in which the tensors of a round are expected back.
#[derive(Debug)]
struct Expected {
    /// Ordinals of tensors, the first expected first.
    order: Arc<[usize]>,
    /// The place of each ordinal in the order.
    position: Vec<Option<usize>>,
    /// Places in the order of the tensors that were given to the disk: only these can be read
    /// ahead.
    on_disk: Vec<usize>,
}

/// The tensors packed between two backwards. `E` leads to a saved tensor and does not keep it
/// alive.
#[derive(Debug)]
pub struct Round<E> {
    phase: i64,
    /// The key of the last tensor; it depends on the sizes of all tensors packed until then.
    signature: i64,
    entries: Vec<E>,
    /// The tensors as places of a guide for later rounds.
    places: Vec<Place>,
    sequences: Vec<i64>,
    /// For each tensor the record that it opened, if it opened a record.
    packed: Vec<Option<NewRecord>>,
    /// Ordinals, in the order of their first unpacks.
    needed: Vec<usize>,
    is_needed: Vec<bool>,
    /// Time of the first unpack of each record, by the key of the record.
    record_needed_s: HashMap<i64, f64>,
    expected: Option<Expected>,
    plan: Option<Arc<Plan>>,
    /// The place this round has reached on the clock of its plan.
    progress_s: f64,
    /// When the next read should begin, on the same clock; infinite if no plan tells.
    next_start_s: f64,
    /// The saved bytes in memory when this round was first asked for a tensor.
    resident_bytes: Option<u64>,
    stall_s: f64,
    /// When the first tensor was packed, and when the last unpack happened.
    began_s: f64,
    ended_s: f64,
    /// The key of the first tensor: nothing else is known of a round when it begins.
    opening: i64,
    /// The number of plans that had been made when it began.
    plan_count: u64,
    /// Seconds spent in the hooks for its tensors.
    hooks_s: f64,
    /// True if the round need not see the tensors after its first.
    is_skimmed: bool,
    /// True if the next packed tensor begins another round.
    is_closed: bool,
    /// True if the times of packs and unpacks are not known.
    is_untimed: bool,
    /// Number of its tensors that have a recipe.
    pub recipe_count: usize,
    /// The guide of this round, and the place reached in it.
    cursor: GuideCursor,
    /// Number of entries at which the older entries are checked for dead tensors.
    look_at: usize,
}

/// The key of the tensor of `nbytes` that is packed after the tensor with `key`.
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
            places: Vec::new(),
            sequences: Vec::new(),
            packed: Vec::new(),
            needed: Vec::new(),
            is_needed: Vec::new(),
            record_needed_s: HashMap::new(),
            expected: None,
            plan: None,
            progress_s: f64::NEG_INFINITY,
            next_start_s: f64::INFINITY,
            resident_bytes: None,
            stall_s: 0.0,
            began_s: 0.0,
            ended_s: 0.0,
            opening: 0,
            plan_count: 0,
            hooks_s: 0.0,
            is_skimmed: false,
            is_closed: false,
            is_untimed: false,
            recipe_count: 0,
            cursor: GuideCursor::default(),
            look_at: DEAD_ROUND_COUNT,
        }
    }

    /// The backward in which this was packed, or [`FORWARD`].
    pub fn phase(&self) -> i64 {
        self.phase
    }

    /// The signature, equal for all rounds of the same kind.
    pub fn signature(&self) -> i64 {
        self.signature
    }

    /// Number of packed tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if no tensor was packed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensor with this ordinal.
    pub fn entry(&self, ordinal: usize) -> &E {
        &self.entries[ordinal]
    }

    /// Returns true if some tensor was asked for.
    pub fn is_asked_for(&self) -> bool {
        !self.needed.is_empty()
    }

    /// Ordinals, in the order of their first unpacks.
    pub fn needed(&self) -> &[usize] {
        &self.needed
    }

    /// Enters a packed tensor, to which `entry` leads, and returns its ordinal.
    pub fn add(&mut self, entry: E, of: Entry, now_s: f64) -> usize {
        let Entry { sequence, nbytes, gpu, joined, is_narrow } = of;
        let key = next_key(if is_narrow { !self.signature } else { self.signature }, nbytes);
        self.signature = if is_narrow { self.signature } else { key };
        if self.entries.is_empty() {
            (self.began_s, self.ended_s, self.opening) = (now_s, now_s, self.signature);
        }
        let packed = NewRecord { key, nbytes, packed_s: now_s, gpu };
        self.packed.push(joined.is_none().then_some(packed));
        let record_key = joined.unwrap_or(key);
        self.places.push(Place { key, record_key, gpu, stays: false });
        self.cursor.step();
        self.sequences.push(sequence);
        self.is_needed.push(false);
        self.entries.push(entry);
        self.entries.len() - 1
    }

    /// Returns true if the older half of many entries is dead: forwards whose graphs were dropped.
    pub fn is_dead(&mut self, is_dead: impl Fn(&E) -> bool) -> bool {
        if self.entries.len() < self.look_at {
            return false;
        }
        self.look_at = 2 * self.entries.len();
        self.entries[..self.entries.len() / 2].iter().all(is_dead)
    }

    /// Returns true if every tensor was asked for or is dead.
    pub fn is_finished(&self, is_dead: impl Fn(&E) -> bool) -> bool {
        self.entries.iter().zip(&self.is_needed).all(|(entry, needed)| *needed || is_dead(entry))
    }

    /// Returns true if an order is expected. Without an order nothing is read ahead.
    pub fn is_predicted(&self) -> bool {
        self.expected.is_some()
    }

    /// Expects the order that was learned from a round of the same signature, or the reverse of the
    /// nodes. `key_on_disk` returns the name of the record of a tensor that was given to the disk.
    pub fn predict(
        &mut self,
        learned: Option<Arc<[usize]>>,
        plan: Option<Arc<Plan>>,
        key_on_disk: impl Fn(&E) -> Option<i64>,
    ) {
        let count = self.entries.len();
        let order = learned.unwrap_or_else(|| {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by_key(|&ordinal| (Reverse(self.sequences[ordinal]), ordinal));
            order.into()
        });
        let mut position = vec![None; count];
        let (mut on_disk, mut next_start_s) = (Vec::new(), f64::INFINITY);
        for (place, &ordinal) in order.iter().enumerate().filter(|(_, ordinal)| **ordinal < count) {
            position[ordinal] = Some(place);
            if let Some(key) = key_on_disk(&self.entries[ordinal]) {
                on_disk.push(place);
                let start_s = plan.as_ref().and_then(|plan| plan.start_by_s.get(&key));
                next_start_s = start_s.map_or(next_start_s, |start_s| next_start_s.min(*start_s));
            }
        }
        self.expected = Some(Expected { order, position, on_disk });
        (self.plan, self.next_start_s) = (plan, next_start_s);
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

    /// Notes that a tensor with this key, which is not followed, is asked for.
    pub fn note_passed(&mut self, key: i64) {
        if let Some(planned_s) = self.plan.as_ref().and_then(|plan| plan.needed_s.get(&key)) {
            self.progress_s = self.progress_s.max(*planned_s);
        }
    }

    /// Counts a wait for one of its tensors.
    pub fn note_stall(&mut self, stall_s: f64) {
        self.stall_s += stall_s;
    }

    /// Notes the bytes in memory; returns how far they are below those at its first unpack.
    ///
    /// Reads that nobody foresaw and tensors that are made again raise the bytes in memory. If that
    /// counted as room, reads ahead would fill it, and the next of these would raise them further.
    pub fn note_resident(&mut self, resident_bytes: u64) -> u64 {
        self.resident_bytes.get_or_insert(resident_bytes).saturating_sub(resident_bytes)
    }

    /// Bytes and tensors of the node that saved most.
    pub fn heaviest_node(&self) -> Heaviest {
        let mut nodes: HashMap<i64, (u64, u64)> = HashMap::new();
        let mut all_bytes = 0;
        for (sequence, packed) in self.sequences.iter().zip(&self.packed) {
            if let Some(record) = packed {
                let node = nodes.entry(*sequence).or_default();
                *node = (node.0 + record.nbytes, node.1 + 1);
                all_bytes += record.nbytes;
            }
        }
        let (nbytes, tensor_count) = nodes.into_values().max().unwrap_or_default();
        Heaviest { nbytes, tensor_count, all_bytes }
    }

    /// The storages that plans are made from; empty if their times are not known.
    pub fn learned_items(&self) -> Vec<Item> {
        if self.is_untimed {
            return Vec::new();
        }
        let item = |&NewRecord { key, nbytes, packed_s, gpu }: &NewRecord| {
            // If several threads wait at once, the clock, which stands still during waits, can go
            // back.
            let needed_s = self.record_needed_s.get(&key)?.max(packed_s);
            Some(Item { key, nbytes, packed_s, needed_s, gpu })
        };
        self.packed.iter().flatten().filter_map(item).collect()
    }

    /// Makes this a round that gives nothing to the disk and need not see the tensors after its
    /// first. Nothing is learned from it.
    pub fn skim(&mut self) {
        self.is_skimmed = true;
    }

    /// Returns true if the round need not see the tensors after its first.
    pub fn is_skimmed(&self) -> bool {
        self.is_skimmed
    }

    /// Follows this guide from now on.
    pub fn begin_guide(&mut self, guide: Arc<[Place]>) {
        self.cursor.begin(guide);
    }

    /// The place in the guide of a tensor of `nbytes` that is packed now. `None` without a guide,
    /// after the first unpack, or once a tensor differed from the guide.
    pub fn guided(&mut self, nbytes: u64) -> Option<Place> {
        if !self.cursor.has_guide() || self.is_closed || self.is_asked_for() {
            return None;
        }
        self.cursor.place(next_key(self.signature, nbytes))
    }

    /// Counts a tensor that is not followed.
    pub fn pass(&mut self, nbytes: u64) {
        self.signature = next_key(self.signature, nbytes);
        self.cursor.pass(nbytes);
    }

    /// Returns true if tensors of this round were not followed; it then teaches nothing about them.
    pub fn is_partial(&self) -> bool {
        self.cursor.has_passed()
    }

    /// The tensors that it packed, as a guide for later rounds of its kind.
    pub fn guide(&self) -> &[Place] {
        &self.places
    }

    /// The name under which its order is remembered. A round that lacks tensors gets the name of
    /// those that it has, because its ordinals stand for these.
    pub(crate) fn order_name(&self) -> i64 {
        if self.is_partial() {
            let keys = self.places.iter().map(|place| place.key as u64);
            return keys.fold(self.signature, next_key);
        }
        self.signature
    }

    /// Says that the times of its packs and unpacks are not known.
    pub fn set_untimed(&mut self) {
        self.is_untimed = true;
    }

    /// Says whether the next packed tensor begins another round.
    pub fn set_closed(&mut self, is_closed: bool) {
        self.is_closed = is_closed;
    }

    /// Returns true if the next packed tensor begins another round.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Counts the time of one call of a hook.
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

    /// Notes the number of plans that were made before it began.
    pub fn set_plan_count(&mut self, plan_count: u64) {
        self.plan_count = plan_count;
    }

    /// The number of plans that were made before it began.
    pub fn plan_count(&self) -> u64 {
        self.plan_count
    }

    /// When the first tensor was packed, and when the last unpack happened.
    pub fn span_s(&self) -> (f64, f64) {
        (self.began_s, self.ended_s)
    }

    /// The waits for its tensors.
    pub fn stall_s(&self) -> f64 {
        self.stall_s
    }

    /// The place of a tensor in the expected order; `None` for a tensor that was packed after the
    /// order was predicted, because nothing is known of its place.
    pub fn position(&self, ordinal: usize) -> Option<usize> {
        self.expected.as_ref()?.position.get(ordinal).copied().flatten()
    }

    /// Places in the order of the tensors that can be read ahead.
    pub(crate) fn on_disk(&self) -> &[usize] {
        self.expected.as_ref().map_or(&[], |expected| &expected.on_disk)
    }

    /// The ordinal at a place in the order.
    pub(crate) fn at(&self, place: usize) -> usize {
        self.expected.as_ref().map_or(0, |expected| expected.order[place])
    }

    /// Returns true if, by the plan, the read of a record should begin before the next need.
    pub(crate) fn is_due(&self, key: i64) -> bool {
        self.start_s(key).is_some_and(|start_s| self.comes_to(start_s))
    }

    /// Returns true if, by the plan, any further read should begin before the next need.
    pub fn is_any_due(&self) -> bool {
        self.comes_to(self.next_start_s)
    }

    /// Notes the record that is read next; `None` if there is none.
    pub(crate) fn note_next(&mut self, key: Option<i64>) {
        self.next_start_s = key.and_then(|key| self.start_s(key)).unwrap_or(f64::INFINITY);
    }

    fn start_s(&self, key: i64) -> Option<f64> {
        self.plan.as_ref()?.start_by_s.get(&key).copied()
    }

    fn comes_to(&self, start_s: f64) -> bool {
        let gap_s = self.plan.as_ref().map_or(0.0, |plan| plan.longest_gap_s);
        start_s <= self.progress_s + gap_s
    }
}
