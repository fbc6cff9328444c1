//! The plan for a tensor on a GPU: its destination, and the moments of its pack, its need and its
//! copy. `planning/policy.py` makes the plans.

use pyo3::prelude::*;
use ssdtrain_core::staging::Tier;

use crate::gpu::Gpus;
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
        Self { tier: Tier::Disk, key: None, copied_s: None }
    }
}

impl ByPlan {
    /// The last plan for the tensor with this key.
    pub fn of(py: Python<'_>, planning: &Planning, key: i64) -> PyResult<Self> {
        let tier = if planning.pins(py, key)? { Tier::Pinned } else { Tier::Disk };
        let copied_s = planning.moments(py, key)?.and_then(|(_, _, copied_s)| copied_s);
        Ok(Self { tier, key: Some(key), copied_s })
    }
}

impl Gpus {
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
