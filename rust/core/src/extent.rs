//! Which bytes of a file (or of the arena) are taken: pure bookkeeping, no I/O.
//!
//! Activations are a stack, so what was freed last is asked for first, and it is also the best
//! place to write: its blocks exist, and its pages are resident. The allocator therefore tries the
//! regions freed most recently, then the smallest region that fits, and grows only when none does.

use std::collections::{BTreeMap, BTreeSet};

/// How many recently freed regions are tried before the search by size.
const RECENT_MAX: usize = 16;

/// Hands out ranges of `[0, limit)`, merges what comes back.
#[derive(Debug)]
pub struct ExtentAllocator {
    granularity: u64,
    limit: u64,
    /// End of the highest range ever handed out since the last [`ExtentAllocator::shrink`].
    end: u64,
    used: u64,
    free_by_offset: BTreeMap<u64, u64>,
    free_by_len: BTreeSet<(u64, u64)>,
    /// Offsets of regions that grew by a free, the newest last; stale entries are skipped.
    recent: Vec<u64>,
}

impl ExtentAllocator {
    /// An empty allocator whose offsets and lengths are multiples of `granularity` bytes.
    ///
    /// # Panics
    /// If `granularity` is zero.
    pub fn new(granularity: u64, limit: u64) -> Self {
        assert!(granularity > 0, "a granularity of zero bytes cannot round anything");
        Self {
            granularity,
            limit,
            end: 0,
            used: 0,
            free_by_offset: BTreeMap::new(),
            free_by_len: BTreeSet::new(),
            recent: Vec::new(),
        }
    }

    /// Bytes handed out and not yet freed, after rounding.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// End of the range in use or once used: what must exist behind the allocator.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// `len` rounded up to what [`ExtentAllocator::allocate`] takes for it; `None` on overflow.
    pub fn rounded(&self, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.granularity)
    }

    /// The offset of a free range of `len` bytes, or `None` if it would pass the limit.
    pub fn allocate(&mut self, len: u64) -> Option<u64> {
        let len = self.rounded(len)?;
        let offset = match self.take_recent(len).or_else(|| self.best_fit(len)) {
            Some(offset) => {
                self.carve(offset, len);
                offset
            }
            None => self.grow(len)?,
        };
        self.used += len;
        debug_assert!(offset + len <= self.end);
        Some(offset)
    }

    /// Gives `[offset, offset + len)` back; `len` as it was asked for.
    ///
    /// # Panics
    /// If the range was not handed out: a double free would give two tensors the same bytes.
    pub fn free(&mut self, offset: u64, len: u64) {
        let len = self.rounded(len).expect("a length that was allocated has been rounded before");
        assert!(offset + len <= self.end, "freed a range beyond what was handed out");
        let (mut start, mut total) = (offset, len);
        if let Some((&before, &before_len)) = self.free_by_offset.range(..offset).next_back() {
            assert!(before + before_len <= offset, "freed a range that is already free");
            if before + before_len == offset {
                self.remove(before, before_len);
                start = before;
                total += before_len;
            }
        }
        if let Some((&after, &after_len)) = self.free_by_offset.range(offset..).next() {
            assert!(offset + len <= after, "freed a range that is already free");
            if offset + len == after {
                self.remove(after, after_len);
                total += after_len;
            }
        }
        self.insert(start, total);
        self.used -= len;
        if self.recent.last() != Some(&start) {
            if self.recent.len() == RECENT_MAX {
                self.recent.remove(0);
            }
            self.recent.push(start);
        }
    }

    /// Forgets the free region at the end, so that `end` falls; returns the new end.
    pub fn shrink(&mut self) -> u64 {
        if let Some((&offset, &len)) = self.free_by_offset.iter().next_back()
            && offset + len == self.end
        {
            self.remove(offset, len);
            self.end = offset;
        }
        self.end
    }

    fn take_recent(&mut self, len: u64) -> Option<u64> {
        while let Some(&offset) = self.recent.last() {
            match self.free_by_offset.get(&offset) {
                None => {
                    self.recent.pop();
                }
                Some(&have) if have >= len => return Some(offset),
                Some(_) => break,
            }
        }
        let fits = |offset: &&u64| self.free_by_offset.get(offset).is_some_and(|&have| have >= len);
        self.recent.iter().rev().find(fits).copied()
    }

    fn best_fit(&self, len: u64) -> Option<u64> {
        self.free_by_len.range((len, 0)..).next().map(|&(_, offset)| offset)
    }

    /// Takes the first `len` bytes of the free region at `offset`.
    fn carve(&mut self, offset: u64, len: u64) {
        let have = self.free_by_offset[&offset];
        self.remove(offset, have);
        if have > len {
            self.insert(offset + len, have - len);
            // The rest is as recent as the whole was.
            if let Some(entry) = self.recent.iter_mut().rev().find(|entry| **entry == offset) {
                *entry = offset + len;
            }
        }
    }

    /// Extends the end; a free region that touches it is used first.
    fn grow(&mut self, len: u64) -> Option<u64> {
        let tail = self.free_by_offset.iter().next_back().map(|(&offset, &have)| (offset, have));
        let start = match tail {
            Some((offset, have)) if offset + have == self.end => offset,
            _ => self.end,
        };
        let end = start.checked_add(len).filter(|&end| end <= self.limit)?;
        if start < self.end {
            self.remove(start, self.end - start);
        }
        self.end = end;
        Some(start)
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.free_by_offset.insert(offset, len);
        self.free_by_len.insert((len, offset));
    }

    fn remove(&mut self, offset: u64, len: u64) {
        let removed = self.free_by_offset.remove(&offset);
        assert_eq!(removed, Some(len), "the two indexes of free regions disagree");
        self.free_by_len.remove(&(len, offset));
    }
}

#[cfg(test)]
mod tests {
    use super::ExtentAllocator;
    use proptest::prelude::*;

    #[test]
    fn what_was_freed_last_is_reused_first() {
        let mut space = ExtentAllocator::new(512, 1 << 30);
        let offsets: Vec<u64> = (0..4).map(|_| space.allocate(4096).unwrap()).collect();
        space.free(offsets[0], 4096);
        space.free(offsets[2], 4096);
        assert_eq!(space.allocate(4096), Some(offsets[2]));
        assert_eq!(space.allocate(4096), Some(offsets[0]));
        assert_eq!(space.end(), 4 * 4096);
    }

    #[test]
    fn a_limit_is_a_limit() {
        let mut space = ExtentAllocator::new(512, 8192);
        assert_eq!(space.allocate(8193), None);
        assert_eq!(space.allocate(u64::MAX), None);
        assert_eq!(space.allocate(8192), Some(0));
        assert_eq!(space.allocate(1), None);
    }

    #[test]
    #[should_panic(expected = "already free")]
    fn a_double_free_is_refused() {
        let mut space = ExtentAllocator::new(512, 8192);
        let offset = space.allocate(1024).unwrap();
        space.allocate(1024).unwrap();
        space.free(offset, 1024);
        space.free(offset, 1024);
    }

    proptest! {
        /// Against a bitmap of granules: no overlap, nothing lost, merged again at the end.
        #[test]
        fn no_byte_is_handed_out_twice(
            steps in proptest::collection::vec((any::<bool>(), 1u64..9000, any::<usize>()), 1..200),
        ) {
            let (granule, limit) = (512u64, 256 * 512u64);
            let mut space = ExtentAllocator::new(granule, limit);
            let mut taken = vec![false; (limit / granule) as usize];
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (allocate, len, pick) in steps {
                if allocate {
                    let Some(offset) = space.allocate(len) else { continue };
                    for granule_index in offset / granule..(offset + len).div_ceil(granule) {
                        prop_assert!(!taken[granule_index as usize]);
                        taken[granule_index as usize] = true;
                    }
                    live.push((offset, len));
                } else if !live.is_empty() {
                    let (offset, len) = live.swap_remove(pick % live.len());
                    space.free(offset, len);
                    for granule_index in offset / granule..(offset + len).div_ceil(granule) {
                        taken[granule_index as usize] = false;
                    }
                }
                let used = taken.iter().filter(|&&bit| bit).count() as u64 * granule;
                prop_assert_eq!(space.used(), used);
            }
            for (offset, len) in live.drain(..) {
                space.free(offset, len);
            }
            prop_assert_eq!(space.used(), 0);
            prop_assert_eq!(space.shrink(), 0);
        }
    }
}
