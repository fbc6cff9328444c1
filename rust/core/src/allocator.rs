//! Bookkeeping of the bytes that are taken in a file or in the arena. It does no I/O.
//!
//! Activations are a stack: the region freed last has the size that is asked for next. It is also
//! the best place to write, because its blocks exist and its pages are resident. The allocator
//! therefore tries the regions freed most recently, then the smallest region that fits, and grows
//! only if no region fits.

use std::collections::{BTreeMap, BTreeSet};

/// Number of recently freed regions that are tried before the search by size. One backward step
/// frees several tensors before the next write, but neighbouring regions merge. A longer list would
/// be walked in vain at every allocation of a size that fits nowhere.
const RECENT_MAX: usize = 16;

/// Hands out ranges of `[0, limit)` and merges the ranges that come back.
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

    /// End of the highest range in use or once used; the file or the arena must be at least this
    /// long.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The bytes that [`ExtentAllocator::allocate`] takes for `len`; `None` on overflow.
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

    /// Gives `[offset, offset + len)` back; `len` is the length passed to
    /// [`ExtentAllocator::allocate`].
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

    /// Offset and length of each free region below the end, by offset.
    pub fn free_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.free_by_offset.iter().map(|(&offset, &len)| (offset, len))
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
    fn the_region_freed_last_is_reused_first() {
        let mut space = ExtentAllocator::new(512, 1 << 30);
        let offsets: Vec<u64> = (0..4).map(|_| space.allocate(4096).unwrap()).collect();
        space.free(offsets[0], 4096);
        space.free(offsets[2], 4096);
        assert_eq!(space.allocate(4096), Some(offsets[2]));
        assert_eq!(space.allocate(4096), Some(offsets[0]));
        assert_eq!(space.end(), 4 * 4096);
    }

    /// `count` regions of `len` bytes, each with a taken region behind it, so that none merges.
    fn apart(space: &mut ExtentAllocator, count: usize, len: u64) -> Vec<u64> {
        let pair = |_| (space.allocate(len).unwrap(), space.allocate(1).unwrap());
        (0..count).map(pair).map(|(offset, _)| offset).collect()
    }

    #[test]
    fn the_newest_that_fits_comes_first_and_its_rest_stays_the_newest() {
        let mut space = ExtentAllocator::new(512, 1 << 30);
        let (large, small) = (apart(&mut space, 2, 2048), apart(&mut space, 1, 512));
        for (offset, len) in [(large[0], 2048), (large[1], 2048), (small[0], 512)] {
            space.free(offset, len);
        }
        assert_eq!(space.allocate(1024), Some(large[1]));
        assert_eq!(space.allocate(512), Some(small[0]));
        assert_eq!(space.allocate(512), Some(large[1] + 1024));
        assert_eq!(space.allocate(512), Some(large[1] + 1536));
        assert_eq!(space.allocate(512), Some(large[0]));
    }

    #[test]
    fn of_old_free_regions_the_smallest_that_fits_is_taken() {
        let mut space = ExtentAllocator::new(512, 1 << 30);
        let fitting: Vec<u64> = [8192, 2048, 4096].map(|len| apart(&mut space, 1, len)[0]).into();
        let newer = apart(&mut space, super::RECENT_MAX, 512);
        for (&offset, len) in fitting.iter().zip([8192, 2048, 4096]) {
            space.free(offset, len);
        }
        for offset in newer {
            space.free(offset, 512);
        }
        assert_eq!(space.allocate(2048), Some(fitting[1]));
        assert_eq!(space.allocate(2048), Some(fitting[2]));
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

    /// The same ranges as a map of granules, and the live ranges.
    struct Model {
        granularity: u64,
        taken: Vec<bool>,
        live: Vec<(u64, u64)>,
    }

    impl Model {
        fn set(&mut self, offset: u64, len: u64, taken: bool) {
            assert!(offset.is_multiple_of(self.granularity), "not aligned");
            let first = (offset / self.granularity) as usize;
            let last = (offset + len).div_ceil(self.granularity) as usize;
            for granule in &mut self.taken[first..last] {
                assert_ne!(*granule, taken, "a granule in two hands");
                *granule = taken;
            }
        }

        /// Lengths of the free runs below `end`, in granules.
        fn free_runs(&self, end: u64) -> Vec<u64> {
            let below = &self.taken[..(end / self.granularity) as usize];
            below.split(|&taken| taken).map(|run| run.len() as u64).filter(|&len| len > 0).collect()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Compares with a map of granules: ranges are aligned and do not overlap, no byte is lost,
        /// neighbours merge at once, the range freed last is reused first, the end grows only if no
        /// free range fits, and `end` is true.
        #[test]
        fn no_byte_is_handed_out_twice(
            granularity in prop::sample::select(vec![1u64, 512, 4096]),
            steps in prop::collection::vec((0u8..9, 1u64..17, any::<usize>()), 1..200),
        ) {
            let limit = 96 * granularity;
            let mut space = ExtentAllocator::new(granularity, limit);
            let (taken, live) = (vec![false; 96], Vec::new());
            let mut model = Model { granularity, taken, live };
            let mut last_freed = None;
            for (action, granules, pick) in steps {
                // Not every length is a whole number of granules.
                let len = granules * granularity - (pick as u64 % granularity);
                let (end, need) = (space.end(), granules * granularity);
                match action {
                    0..5 => {
                        let fits = model.free_runs(end).into_iter().any(|run| run >= granules);
                        if let Some(offset) = space.allocate(len) {
                            model.set(offset, len, true);
                            model.live.push((offset, len));
                            prop_assert!(space.end() == end || !fits, "grew with room left");
                            if let Some((start, free)) = last_freed && free >= need {
                                prop_assert_eq!(offset, start, "not what was freed last");
                            }
                        } else {
                            let longest = model.free_runs(limit).into_iter().max();
                            prop_assert!(longest < Some(granules), "refused with room left");
                        }
                        last_freed = None;
                    }
                    5..8 if !model.live.is_empty() => {
                        let (offset, len) = model.live.swap_remove(pick % model.live.len());
                        model.set(offset, len, false);
                        space.free(offset, len);
                        let merged = space.free_by_offset.range(..=offset).next_back();
                        last_freed = merged.map(|(&at, &len)| (at, len));
                    }
                    _ => {
                        let last = model.taken.iter().rposition(|&taken| taken);
                        let end = last.map_or(0, |granule| (granule as u64 + 1) * granularity);
                        prop_assert_eq!(space.shrink(), end);
                        prop_assert_eq!(space.end(), end);
                        last_freed = None;
                    }
                }
                let free = space.free_by_offset.values().map(|len| len / granularity);
                let merged = model.free_runs(space.end());
                prop_assert_eq!(free.collect::<Vec<_>>(), merged, "neighbours are not merged");
                let taken = model.taken.iter().filter(|&&taken| taken).count() as u64;
                prop_assert_eq!(space.used(), taken * granularity);
                prop_assert_eq!(space.free_by_len.len(), space.free_by_offset.len());
                prop_assert!(space.recent.len() <= super::RECENT_MAX);
            }
            for (offset, len) in model.live.drain(..) {
                space.free(offset, len);
            }
            prop_assert_eq!((space.used(), space.shrink()), (0, 0));
        }
    }
}
