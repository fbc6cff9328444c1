//! What the plan of its round says of a tensor on a GPU: where it goes, and when it is packed,
//! needed and copied. `planning/policy.py` makes the plans.

use pyo3::prelude::*;
use ssdtrain_core::staging::Tier;

use crate::gpu::Gpus;
use crate::partners::Planning;

/// What a plan says of a tensor that leaves a GPU.
#[derive(Clone, Copy)]
pub struct ByPlan {
    /// Where it shall stay.
    pub tier: Tier,
    /// When it has been copied, in seconds since the first pack of its round.
    pub copied_s: Option<f64>,
}

/// What a program comes to.
#[derive(Clone, Copy)]
pub enum Use {
    Pack,
    Need,
}

impl Default for ByPlan {
    /// Of which no plan says anything.
    fn default() -> Self {
        Self { tier: Tier::Disk, copied_s: None }
    }
}

impl ByPlan {
    /// What the last plan says of the tensor with this key.
    pub fn of(py: Python<'_>, planning: &Planning, key: i64) -> PyResult<Self> {
        let tier = if planning.pins(py, key)? { Tier::Pinned } else { Tier::Disk };
        let copied_s = planning.moments(py, key)?.and_then(|(_, _, copied_s)| copied_s);
        Ok(Self { tier, copied_s })
    }
}

impl Gpus {
    /// Notes that the program packs, or needs, the tensor with this key on a GPU now: so far it has
    /// come by the plan of its round. What no plan knows tells nothing.
    pub fn note_progress(
        &self,
        py: Python<'_>,
        planning: &Planning,
        gpu: usize,
        key: i64,
        of: Use,
    ) -> PyResult<()> {
        let Some(way) = self.known(gpu) else { return Ok(()) };
        if let Some((packed_s, needed_s, _)) = planning.moments(py, key)? {
            way.note_progress(match of {
                Use::Pack => packed_s,
                Use::Need => needed_s,
            });
        }
        Ok(())
    }
}
