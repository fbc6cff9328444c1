//! The checksums of an extent: one for each block of bytes that travels as one piece.
//!
//! The thread that gives bytes to the store sums all of them up before it returns. Later the memory
//! may change, which must be found, or be gone: `resize_` and `share_memory_` free the memory of a
//! tensor that somebody holds. The kernel answers then that the address is bad; a worker that
//! looked there would end the process.
//!
//! The worker that reads a block compares it, so the thread that waits does not pay for that. One
//! block (4 MiB) takes it 0.2 to 0.6 ms, in which the kernel goes on with the other pieces in
//! flight: with 16 of them the disk has 20 ms of work left at 3 GB/s. `docs/results/storage.md` has
//! the figures (`benches/io/verify_cost.py`).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Checksums by block, and which bytes of the extent they are about.
#[derive(Debug)]
pub struct Checksums {
    /// The bytes that were given to the store. Those around them, to which a write was widened,
    /// belong to somebody else and may change at any time.
    own: Range<usize>,
    block_bytes: usize,
    /// Written before the write is queued, and read after its ticket was answered.
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

    /// Bytes of a block; the last one may have fewer.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
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
