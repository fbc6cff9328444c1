//! Pinned memory in which tensors of a GPU stay by plan, so that they never go to the disk.
//!
//! It is separate from the slots that tensors pass through, so that those keep their room. It grows
//! between steps, in blocks, and is freed with the staging of its GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::gpu::Gpu;
use crate::error::Result;
use crate::memory::pinned::{PinnedPool, PinnedSlot, cut};

/// A tensor for which no block has room in one piece lies there in parts of this size. It is halved
/// for the rests of blocks.
const PART_BYTES: usize = 32 << 20;
const PART_BYTES_MIN: usize = 1 << 20;

/// The blocks of one GPU.
#[derive(Debug, Default)]
pub struct PinnedTier(Mutex<Vec<Arc<PinnedPool>>>);

impl PinnedTier {
    /// Pins another block.
    pub fn grow(&self, gpu: &Arc<Gpu>, nbytes: usize) -> Result<()> {
        let pool = PinnedPool::new(gpu, nbytes)?;
        self.pools().push(pool);
        Ok(())
    }

    /// Cuts a slot from the first block with room, or slots for parts from several blocks; `None`
    /// if they have too little room.
    pub fn slots(&self, len: usize) -> Option<Vec<PinnedSlot>> {
        let pools = self.pools();
        let slot = |len| pools.iter().find_map(|pool| pool.slot(len));
        slot(len).map(|whole| vec![whole]).or_else(|| cut(len, PART_BYTES, PART_BYTES_MIN, slot))
    }

    /// Bytes of all blocks, and the bytes of them in slots.
    pub fn bytes(&self) -> (usize, usize) {
        let pools = self.pools();
        let sizes = pools.iter().map(|pool| (pool.len(), pool.live_bytes()));
        sizes.fold((0, 0), |sum, pool| (sum.0 + pool.0, sum.1 + pool.1))
    }

    fn pools(&self) -> MutexGuard<'_, Vec<Arc<PinnedPool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
