//! The memory that a read fills: a slot, memory that the caller lends, or parts of both.
//!
//! Direct I/O moves whole blocks to aligned addresses. The write had been widened to whole blocks,
//! so a read moves more bytes than the caller asks for:
//!
//! ```text
//! on the disk    |..hhhh|mmmmmm|mmmmmm|tt....|    the caller's bytes, and the bytes around them
//! lent memory        hhhh mmmmmm mmmmmm tt        nothing around it may be written
//! ```
//!
//! If the lent memory begins at the same offset within a block as the source did, the middle
//! (`mmm`) goes straight there. The blocks at the ends go to a slot, and the caller's part of them
//! is copied. If it begins elsewhere, no address fits: everything goes to a slot and is copied.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::{Arena, Slot};
use crate::memory::host::{Checksum, HostTarget};

/// The memory for the bytes of a read, or for a part of them.
#[derive(Clone, Debug)]
pub struct Landing {
    layout: Arc<Layout>,
    start: usize,
    len: usize,
}

/// Positions count from the first byte that is read.
#[derive(Debug)]
struct Layout {
    /// The memory for bytes that do not go straight to lent memory.
    slot: Option<HostTarget>,
    /// The bytes that go straight to lent memory; empty if none do.
    direct: Range<usize>,
    lent: Option<Lent>,
}

#[derive(Debug)]
struct Lent {
    target: HostTarget,
    /// Position of its first byte.
    start: usize,
}

/// A run of memory that one entry of a vectored call covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span<Address> {
    /// First byte.
    pub address: Address,
    /// Length in bytes.
    pub len: usize,
}

impl From<Arc<Slot>> for Landing {
    fn from(slot: Arc<Slot>) -> Self {
        let len = slot.len();
        let layout = Layout { slot: Some(HostTarget::from(slot)), direct: 0..0, lent: None };
        Self { layout: Arc::new(layout), start: 0, len }
    }
}

impl Landing {
    /// Lays out a read of `len` bytes. The bytes from `head` on come to `target`.
    ///
    /// # Panics
    /// If the target ends beyond the read.
    pub fn into_lent(
        target: HostTarget,
        head: usize,
        len: usize,
        alignment: usize,
        arena: &Arc<Arena>,
    ) -> Result<Self> {
        let end = head + target.len();
        assert!(end <= len, "the target ends beyond the read");
        let address = target.address(0, target.len()) as usize;
        let (first, last) = (head.next_multiple_of(alignment), end / alignment * alignment);
        let fits = address % alignment == head % alignment && first < last;
        let direct = if fits { first..last } else { 0..0 };
        let slot_len = len - direct.len();
        if target.is_on_gpu() && slot_len > 0 {
            let message = "memory of a GPU takes whole blocks of the disk";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let slot = if slot_len > 0 { Some(Arc::new(arena.slot(slot_len)?).into()) } else { None };
        let layout = Layout { slot, direct, lent: Some(Lent { target, start: head }) };
        Ok(Self { layout: Arc::new(layout), start: 0, len })
    }

    /// Returns true if the bytes go to memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.layout.lent.as_ref().is_some_and(|lent| lent.target.is_on_gpu())
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part `[start, start + len)`, which keeps the whole memory alive.
    ///
    /// # Panics
    /// If it does not lie inside.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "part outside landing");
        Self { layout: Arc::clone(&self.layout), start: self.start + start, len }
    }

    /// The memory for the bytes `[start, start + len)`, at most three spans.
    pub fn spans(&self, start: usize, len: usize) -> impl Iterator<Item = Span<*mut u8>> {
        self.runs(start, len).map(|(target, range)| Span {
            address: target.address(range.start, range.len()),
            len: range.len(),
        })
    }

    /// Copies `bytes` to the memory for the bytes at `start`, as the kernel would.
    pub fn copy_in(&self, start: usize, bytes: &[u8]) {
        let mut rest = bytes;
        for (target, range) in self.runs(start, bytes.len()) {
            let (now, later) = rest.split_at(range.len());
            target.copy_in(range.start, now);
            rest = later;
        }
    }

    /// Adds the bytes of `range`, which have been read, to a checksum.
    pub fn hash(&self, range: Range<usize>, sum: &mut Checksum) {
        for (target, range) in self.runs(range.start, range.len()) {
            target.hash(range, sum);
        }
    }

    /// Copies the bytes of `[start, start + len)` from the slot to the lent memory, if there is any
    /// and the bytes are not there already.
    pub fn deliver(&self, start: usize, len: usize) {
        let Layout { slot: Some(slot), direct, lent: Some(lent) } = &*self.layout else { return };
        let (start, end) = (self.start + start, self.start + start + len);
        let lent_end = lent.start + lent.target.len();
        for side in [0..direct.start, direct.end..usize::MAX] {
            let from = start.max(lent.start).max(side.start);
            let to = end.min(lent_end).min(side.end);
            if from < to {
                let in_slot = from - if from < direct.start { 0 } else { direct.len() };
                slot.copy_to(in_slot, &lent.target, from - lent.start, to - from);
            }
        }
    }

    /// The targets of `[start, start + len)`, each with the range inside it.
    fn runs(&self, start: usize, len: usize) -> impl Iterator<Item = (&HostTarget, Range<usize>)> {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "outside the landing");
        let Layout { slot, direct, lent } = &*self.layout;
        let (start, end) = (self.start + start, self.start + start + len);
        let before = start..end.min(direct.start);
        let inside = start.max(direct.start)..end.min(direct.end);
        let behind = start.max(direct.end)..end;
        let lent = lent.as_ref();
        // In the slot, the bytes behind the direct part follow directly on the bytes before it.
        [
            (slot.as_ref(), before, 0),
            (lent.map(|lent| &lent.target), inside, lent.map_or(0, |lent| lent.start)),
            (slot.as_ref(), behind, direct.len()),
        ]
        .into_iter()
        .filter(|(_, range, _)| range.start < range.end)
        .map(|(target, range, less)| {
            let target = target.expect("the layout has memory for every byte");
            (target, range.start - less..range.end - less)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Landing;
    use crate::memory::arena::Arena;
    use crate::memory::host::{Checksum, HostTarget};
    use proptest::prelude::*;
    use std::sync::Arc;

    const BLOCK: usize = 512;

    proptest! {
        /// For all offsets and lengths, each byte arrives once in its place, and no other byte of
        /// the memory changes.
        #[test]
        fn bytes_arrive_in_their_range_and_nowhere_else(
            head in 0..BLOCK,
            lent_offset in 0..BLOCK,
            is_same_offset in any::<bool>(),
            lent_len in 1..6 * BLOCK,
            cuts in proptest::collection::vec(any::<usize>(), 0..4),
        ) {
            let lent_offset = if is_same_offset { head } else { lent_offset };
            let len = (head + lent_len).next_multiple_of(BLOCK);
            let arena = Arena::new(0).unwrap();
            // Lent memory is a part of a slot here, so that the bytes around it can be checked.
            let around = HostTarget::from(Arc::new(arena.slot(16 * BLOCK).unwrap()));
            around.copy_in(0, &[0xee; 16 * BLOCK]);
            let lent = around.part(2 * BLOCK + lent_offset, lent_len);
            let landing = Landing::into_lent(lent, head, len, BLOCK, &arena).unwrap();
            let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (len / BLOCK) * BLOCK).collect();
            ends.extend([0, len]);
            ends.sort_unstable();
            let mut sum = Checksum::default();
            for pair in ends.windows(2) {
                let part = landing.part(pair[0], pair[1] - pair[0]);
                for span in part.spans(0, part.len()) {
                    prop_assert!((span.address as usize).is_multiple_of(BLOCK), "not aligned");
                    prop_assert!(span.len.is_multiple_of(BLOCK), "not whole blocks");
                }
                part.copy_in(0, &bytes[pair[0]..pair[1]]);
                part.hash(0..part.len(), &mut sum);
                part.deliver(0, part.len());
            }
            prop_assert_eq!(sum.value(), xxhash_rust::xxh3::xxh3_64(&bytes));
            let mut all = vec![0; 16 * BLOCK];
            around.copy_out(0, &mut all);
            let mut expected = vec![0xee; 16 * BLOCK];
            let inside = &mut expected[2 * BLOCK + lent_offset..][..lent_len];
            inside.copy_from_slice(&bytes[head..][..lent_len]);
            prop_assert!(all == expected);
        }
    }
}
