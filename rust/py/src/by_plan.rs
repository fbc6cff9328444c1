//! What the plan of its round says of a tensor on a GPU: where it goes, and when it is packed,
//! needed and copied. `planning/policy.py` makes the plans; its object is the `policy` here.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ssdtrain_core::staging::Tier;

use crate::gpu::Gpus;

/// Seconds since the first pack of its round: when a tensor is packed, when it is needed, and, if
/// it leaves, when it has been copied from its GPU.
type Moments = (f64, f64, Option<f64>);

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
    pub fn of(policy: &Bound<'_, PyAny>, key: i64) -> PyResult<Self> {
        let pinned = policy.getattr(intern!(policy.py(), "pinned"))?;
        let tier = if pinned.contains(key)? { Tier::Pinned } else { Tier::Disk };
        let copied_s = moments(policy, key)?.and_then(|(_, _, copied_s)| copied_s);
        Ok(Self { tier, copied_s })
    }
}

impl Gpus {
    /// Notes that the program packs, or needs, the tensor with this key on a GPU now: so far it has
    /// come by the plan of its round. What no plan knows tells nothing.
    pub fn note_progress(
        &self,
        policy: &Bound<'_, PyAny>,
        gpu: usize,
        key: i64,
        of: Use,
    ) -> PyResult<()> {
        let Some(way) = self.known(gpu) else { return Ok(()) };
        if let Some((packed_s, needed_s, _)) = moments(policy, key)? {
            way.note_progress(match of {
                Use::Pack => packed_s,
                Use::Need => needed_s,
            });
        }
        Ok(())
    }
}

fn moments(policy: &Bound<'_, PyAny>, key: i64) -> PyResult<Option<Moments>> {
    let known = policy.getattr(intern!(policy.py(), "moments"))?;
    known.cast::<PyDict>()?.get_item(key)?.map(|one| one.extract()).transpose()
}
