//! The checksums of an extent: one for each block of bytes that travels as one piece.
//!
//! The worker that writes a block sums it up just before the kernel gets it, and the worker that
//! reads it compares. So neither the thread that saves nor the one that waits pays for it, and a
//! block that changes while the kernel has it is found. One block (4 MiB) takes a worker 0.2 to 0.6
//! ms, in which the kernel goes on with the other pieces in flight: with 16 of them the disk has 20
//! ms of work left at 3 GB/s. The rates with and without checksums, and what the calling thread
//! paid before, are in `docs/reliability.md` (`benches/io/verify_cost.py`). A thread of its own for
//! the sums would gain only where one directory moves more than a core can sum up, 7 GB/s or more.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Checksums by block, and which bytes of the extent they are about.
#[derive(Debug)]
pub struct Checksums {
    /// The bytes that were given to the store. Those around them, to which a write was widened,
    /// belong to somebody else and may change at any time.
    own: Range<usize>,
    block_bytes: usize,
    /// Written before the write's ticket is answered, and read after: nothing else orders them.
    sums: Box<[AtomicU64]>,
}

impl Checksums {
    /// For an extent of `len` bytes of which `own` were given to the store.
    ///
    /// # Panics
    /// If a block has no bytes.
    pub fn new(own: Range<usize>, len: usize, block_bytes: usize) -> Self {
        assert!(block_bytes > 0, "a block has bytes");
        let sums = (0..len.div_ceil(block_bytes)).map(|_| AtomicU64::new(0)).collect();
        Self { own, block_bytes, sums }
    }

    /// Of the bytes `[start, start + len)`, those that a checksum is about.
    pub fn own_bytes(&self, start: usize, len: usize) -> Range<usize> {
        let first = start.max(self.own.start);
        first..(start + len).min(self.own.end).max(first)
    }

    /// Notes the sum of the block that begins at `start`.
    pub fn set(&self, start: usize, sum: u64) {
        self.sums[start / self.block_bytes].store(sum, Ordering::Relaxed);
    }

    /// The sum of the block that begins at `start`, as it was written.
    pub fn get(&self, start: usize) -> u64 {
        self.sums[start / self.block_bytes].load(Ordering::Relaxed)
    }
}
