//! The plan for a tensor on a GPU: its destination, and the moments of its pack, its need and its
//! copy. `planning/policy.py` makes the plans.

use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use ssdtrain_core::cuda::gpu::Gpu;
use ssdtrain_core::staging::Tier;

use crate::gpu::{GpuWay, Gpus, TIER_BLOCK_BYTES};
use crate::planning::Planning;

/// The plan for a tensor that leaves a GPU.
#[derive(Clone, Copy)]
pub struct ByPlan {
    /// The disk or pinned memory.
    pub tier: Tier,
    /// The policy's name for it; `None` if no plan is asked.
    pub key: Option<i64>,
    /// The end of its copy, in seconds since the first pack of its round on its GPU.
    pub copied_s: Option<f64>,
    /// True if it leaves without a plan, because the bound of a GPU leaves no room: then pinned
    /// memory grows for it, and it waits for a disk that is behind.
    pub is_spare: bool,
}

/// A use of a saved tensor by the program.
#[derive(Clone, Copy)]
pub enum Use {
    Pack,
    Need,
}

impl Default for ByPlan {
    /// For a tensor that no plan has.
    fn default() -> Self {
        Self { tier: Tier::Disk, key: None, copied_s: None, is_spare: false }
    }
}

impl ByPlan {
    /// The last plan for the tensor with this key.
    pub fn of(py: Python<'_>, planning: &Planning, key: i64) -> PyResult<Self> {
        let tier = if planning.pins(py, key)? { Tier::Pinned } else { Tier::Disk };
        let copied_s = planning.moments(py, key)?.and_then(|(_, _, copied_s)| copied_s);
        Ok(Self { tier, key: Some(key), copied_s, is_spare: false })
    }

    /// For a tensor that leaves because there is no room: to pinned memory, else to the disk.
    pub fn spare() -> Self {
        Self { tier: Tier::Pinned, is_spare: true, ..Self::default() }
    }
}

impl GpuWay {
    /// Pins another block in which tensors may stay; `false` if that is not allowed, or failed.
    pub fn grow_tier(&self, py: Python<'_>) -> PyResult<bool> {
        let tier = self.staging.tier();
        let left = self.tier_bytes_max.load(Ordering::Relaxed).saturating_sub(tier.bytes().0);
        let grow = || tier.grow(&Gpu::get(self.gpu)?, left.min(TIER_BLOCK_BYTES));
        let is_allowed = left > 0 && self.calls.may_pin_now.bind(py).call0()?.is_truthy()?;
        let has_grown = is_allowed && py.detach(grow).is_ok();
        if !has_grown {
            self.tier_bytes_max.store(0, Ordering::Relaxed); // It is not tried for each tensor.
        }
        Ok(has_grown)
    }
}

impl Gpus {
    /// True if tensors may stay in pinned memory.
    pub fn may_pin(&self) -> bool {
        self.tier_bytes_max > 0
    }

    /// Notes the progress of the program on a GPU: it packs, or needs, the tensor with this key
    /// now. A key that no plan has changes nothing.
    pub fn note_progress(
        &self,
        py: Python<'_>,
        planning: &Planning,
        gpu: usize,
        key: i64,
        used: Use,
    ) -> PyResult<()> {
        let Some(way) = self.known(gpu) else { return Ok(()) };
        if let Some((packed_s, needed_s, _)) = planning.moments(py, key)? {
            way.note_progress(match used {
                Use::Pack => packed_s,
                Use::Need => needed_s,
            });
        }
        Ok(())
    }
}
