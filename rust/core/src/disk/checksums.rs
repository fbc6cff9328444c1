//! The checksums of an extent: one for each block.
//!
//! The thread that gives bytes to the store sums all of them up before it returns. Later the memory
//! may change, which must be noticed, or be gone: `resize_` and `share_memory_` free the memory of
//! a tensor that is still held. The kernel then reports a bad address; a worker that read there
//! would end the process.
//!
//! The worker that reads a block compares it, so the waiting thread does not pay for that. A block
//! of 4 MiB takes it 0.2 to 0.6 ms, in which the kernel goes on with the other pieces in flight:
//! with 16 of them the disk has 20 ms of work left at 3 GB/s. `docs/results/storage.md` has the
//! figures (`benches/io/verify_cost.py`).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Checksums by block, and the bytes of the extent that they cover.
#[derive(Debug)]
pub struct Checksums {
    /// The bytes that the caller gave to the store. The bytes around them, to which a write was
    /// widened, belong to other objects and may change at any time.
    own: Range<usize>,
    block_bytes: usize,
    /// Written before the write is queued; read after its ticket was answered.
    sums: Box<[AtomicU64]>,
}

impl Checksums {
    /// Checksums for an extent of `len` bytes; the caller gave the bytes of `own`.
    ///
    /// # Panics
    /// If a block has no bytes.
    pub fn new(own: Range<usize>, len: usize, block_bytes: usize) -> Self {
        assert!(block_bytes > 0, "a block has bytes");
        let sums = (0..len.div_ceil(block_bytes)).map(|_| AtomicU64::new(0)).collect();
        Self { own, block_bytes, sums }
    }

    /// Bytes of a block; the last block may have fewer.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The part of `[start, start + len)` that a checksum covers.
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
