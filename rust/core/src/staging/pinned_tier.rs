//! Pinned memory in which tensors of a GPU stay by plan, so that they never go to the disk.
//!
//! It is separate from the slots that tensors pass through, so that those keep their room. It grows
//! between steps, in blocks, and is freed with the staging of its GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::gpu::Gpu;
use crate::error::Result;
use crate::memory::pinned::{PinnedPool, PinnedSlot};

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

    /// Cuts a slot from the first block with room; `None` if no block has room.
    pub fn slot(&self, len: usize) -> Option<PinnedSlot> {
        self.pools().iter().find_map(|pool| pool.slot(len))
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
