//! Pinned memory in which tensors of a GPU stay by plan, so that they never go to the disk.
//!
//! It is beside the memory that tensors go through, which would have no room left else. It grows
//! between steps, in blocks, and is given back with the way of its GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::gpu::Gpu;
use crate::error::Result;
use crate::memory::pinned::{PinnedPool, PinnedSlot};

/// The blocks of one GPU.
#[derive(Debug, Default)]
pub struct PinnedTier(Mutex<Vec<Arc<PinnedPool>>>);

impl PinnedTier {
    /// Pins one more block.
    pub fn grow(&self, gpu: &Arc<Gpu>, nbytes: usize) -> Result<()> {
        let pool = PinnedPool::new(gpu, nbytes)?;
        self.pools().push(pool);
        Ok(())
    }

    /// Cuts a slot from the first block that has room; `None` if none has.
    pub fn slot(&self, len: usize) -> Option<PinnedSlot> {
        self.pools().iter().find_map(|pool| pool.slot(len))
    }

    /// Its bytes, and how many of them are in slots.
    pub fn bytes(&self) -> (usize, usize) {
        let pools = self.pools();
        let sizes = pools.iter().map(|pool| (pool.len(), pool.live_bytes()));
        sizes.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    fn pools(&self) -> MutexGuard<'_, Vec<Arc<PinnedPool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
