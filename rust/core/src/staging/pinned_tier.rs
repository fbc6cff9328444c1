//! Pinned memory in which tensors of a GPU stay by plan, so that they never go to the disk.
//!
//! It is separate from the slots that tensors pass through, so that those keep their room. It grows
//! in blocks: between steps by plan, and within one if the bound of a GPU leaves no room. The
//! driver pins a block for every GPU, so all GPUs of a session share them, and it is freed with the
//! last staging.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::gpu::Gpu;
use crate::error::Result;
use crate::memory::pinned::{PinnedPool, PinnedSlot, cut};

/// A tensor for which no block has room in one piece lies there in parts of this size. It is halved
/// for the rests of blocks.
const PART_BYTES: usize = 32 << 20;
const PART_BYTES_MIN: usize = 1 << 20;

/// The blocks of a session.
#[derive(Debug, Default)]
pub struct PinnedTier(Mutex<Vec<Arc<PinnedPool>>>);

impl PinnedTier {
    /// Pins another block, with the driver of any GPU. 1 GiB takes a quarter of a second, so
    /// a plan has it done between steps.
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
