//! The choice of reads that begin before their tensors are asked for, and the end of a wrong guess.

use std::collections::VecDeque;

use crate::round::{FORWARD, Round};

/// Bytes read ahead: 32 MiB in flight is what one drive needs for its full rate (see
/// `docs/results/storage.md`). A slow disk reads ahead as far as its plan says, and into the memory
/// that its backward has freed: that never raises the peak.
pub const WINDOW_BYTES: u64 = 32 << 20;
/// Records read ahead at most: bounds the work of an unpack where tensors are small.
pub const WINDOW_COUNT: usize = 64;
/// The window is refilled by a quarter at a time: to wake the disk's thread costs more than all
/// else that an unpack does (`benches/training/hook_overhead.py`).
const REFILL_SHARE: usize = 4;

/// The state of a saved tensor that may be read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It is dead, stays in memory, or is being read: it needs no read.
    Settled,
    /// It is in memory now, but may have to be read when its turn comes.
    Leaving,
    /// It has to be read.
    OnDisk {
        /// The name of its record.
        key: i64,
        /// The memory that a read takes.
        slot_bytes: u64,
        /// True if another tensor of the record has the bytes in memory or on their way.
        joins: bool,
    },
}

/// The tensors that were read ahead of one backward.
#[derive(Debug, Default)]
pub struct Window {
    /// Ordinals, each with the bytes that its read adds to memory, in the order of beginning.
    reads: VecDeque<(usize, u64)>,
    nbytes: u64,
    /// The number of places in the order that the backward has reached; none before the first
    /// tensor that is followed.
    reached_count: usize,
    /// The next entry to read ahead, in the round's list of tensors on the disk.
    next_on_disk: usize,
}

/// One walk along the tensors that may be read ahead.
#[derive(Debug)]
pub struct Walk {
    place: usize,
    following_place: usize,
    room_bytes: u64,
    /// Bytes that this backward has freed. Reads may use them beyond the window.
    spare_bytes: u64,
    /// Number of tensors that are leaving memory; the next walk looks at them again.
    unsettled_count: usize,
    /// True if too little can be read ahead now to be worth it.
    is_resting: bool,
    /// Bytes that the next read adds to memory.
    added_bytes: u64,
}

impl Window {
    /// Moves to a tensor that is used now; returns the tensors that were read ahead in vain. `None`
    /// if the place of the tensor in the order is not known.
    ///
    /// `is_another` says that the window was emptied because it followed another round.
    pub fn move_to<E>(
        &mut self,
        round: &Round<E>,
        ordinal: usize,
        is_another: bool,
    ) -> Option<Vec<usize>> {
        let reached_count = round.position(ordinal)? + 1;
        if is_another || reached_count < self.reached_count {
            self.next_on_disk = round.on_disk().partition_point(|&place| place < reached_count);
        }
        self.reached_count = reached_count;
        Some(self.leave_behind(round, ordinal))
    }

    /// Begins with a round of which no tensor that is followed was used yet.
    pub fn begin(&mut self) {
        (self.reached_count, self.next_on_disk) = (0, 0);
    }

    /// Returns true if a window should follow the backward of this round. While a region is
    /// computed again, and nothing of it is on the disk, reading ahead goes on for the forward's
    /// tensors.
    pub fn follows<E>(round: &Round<E>, ordinal: usize) -> bool {
        round.position(ordinal).is_some()
            && (round.phase() == FORWARD || !round.on_disk().is_empty())
    }

    /// Empties the window; returns the tensors that were read ahead.
    pub fn clear(&mut self) -> Vec<usize> {
        self.nbytes = 0;
        self.reads.drain(..).map(|(ordinal, _)| ordinal).collect()
    }

    /// Removes the tensor that is used now from the window, and the tensors that were passed over.
    fn leave_behind<E>(&mut self, round: &Round<E>, ordinal: usize) -> Vec<usize> {
        if let Some(place) = self.reads.iter().position(|(read, _)| *read == ordinal)
            && let Some((_, nbytes)) = self.reads.remove(place)
        {
            self.nbytes -= nbytes;
        }
        let mut passed_over = Vec::new();
        while let Some(&(first, nbytes)) = self.reads.front()
            && round.position(first).is_none_or(|place| place < self.reached_count)
        {
            self.reads.pop_front();
            self.nbytes -= nbytes;
            passed_over.push(first);
        }
        passed_over
    }

    /// Begins a walk along the expected order, to find tensors to read ahead.
    ///
    /// No read may take more than `room_bytes`. Beyond the window, reads may use `spare_bytes` that
    /// this backward has freed. Until a tensor that is followed is used, reads begin when they are
    /// due and not before: the memory is then at its peak.
    pub fn walk<E>(&self, round: &Round<E>, room_bytes: u64, spare_bytes: u64) -> Walk {
        let reached_count = self.reached_count;
        let following_place = round.on_disk().partition_point(|&place| place < reached_count);
        let quarter_bytes = WINDOW_BYTES / REFILL_SHARE as u64;
        let is_full = self.nbytes > WINDOW_BYTES - quarter_bytes && spare_bytes < quarter_bytes;
        let is_crowded = self.reads.len() > WINDOW_COUNT - WINDOW_COUNT / REFILL_SHARE;
        Walk {
            place: self.next_on_disk.max(following_place),
            following_place,
            room_bytes,
            spare_bytes,
            unsettled_count: 0,
            is_resting: is_full || is_crowded || reached_count == 0,
            added_bytes: 0,
        }
    }

    /// The ordinal of the next read that should begin now; pass it to [`note`](Self::note).
    pub fn next<E>(
        &mut self,
        round: &mut Round<E>,
        walk: &mut Walk,
        look: impl Fn(&E) -> Look,
    ) -> Option<usize> {
        while let Some(&place) = round.on_disk().get(walk.place) {
            let ordinal = round.at(place);
            match look(round.entry(ordinal)) {
                Look::Settled => self.pass(walk),
                Look::Leaving => {
                    walk.unsettled_count += 1;
                    walk.place += 1;
                    if walk.unsettled_count > WINDOW_COUNT {
                        break;
                    }
                }
                Look::OnDisk { key, slot_bytes, joins } => {
                    let is_next = walk.place == walk.following_place || self.reads.is_empty();
                    let is_wanted = (is_next && self.reached_count > 0)
                        || self.is_wanted(round, walk, key, slot_bytes);
                    if !joins && (slot_bytes > walk.room_bytes || !is_wanted) {
                        round.note_next(Some(key));
                        return None;
                    }
                    walk.added_bytes = if joins { 0 } else { slot_bytes };
                    return Some(ordinal);
                }
            }
        }
        round.note_next(None);
        None
    }

    /// Notes whether the read that [`next`](Self::next) returned was begun. A refusal is not lost:
    /// the read on demand meets it again.
    pub fn note(&mut self, walk: &mut Walk, ordinal: usize, is_begun: bool) {
        if is_begun {
            self.reads.push_back((ordinal, walk.added_bytes));
            self.nbytes += walk.added_bytes;
            walk.room_bytes = walk.room_bytes.saturating_sub(walk.added_bytes);
            walk.spare_bytes = walk.spare_bytes.saturating_sub(walk.added_bytes);
        }
        self.pass(walk);
    }

    fn pass(&mut self, walk: &mut Walk) {
        walk.place += 1;
        if walk.unsettled_count == 0 {
            self.next_on_disk = walk.place;
        }
    }

    /// Returns true if a read should begin now although its tensor is not the next to be used.
    fn is_wanted<E>(&self, round: &Round<E>, walk: &Walk, key: i64, slot_bytes: u64) -> bool {
        let has_room = slot_bytes <= walk.spare_bytes || self.nbytes + slot_bytes <= WINDOW_BYTES;
        self.reads.len() < WINDOW_COUNT && ((has_room && !walk.is_resting) || round.is_due(key))
    }
}
