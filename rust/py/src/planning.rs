//! The plans of a session: the Python `Policy`, with one typed method here for each question.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ssdtrain_core as core;

/// Seconds since the first pack of its round on its GPU: when a tensor is packed, when it is
/// needed, and, if it leaves, when it has been copied from its GPU.
pub type Moments = (f64, f64, Option<f64>);

/// The `Policy` of a session: the plans of its rounds.
#[derive(FromPyObject)]
#[pyo3(transparent)]
pub struct Planning(Py<PyAny>);

impl Planning {
    /// True if the last plan keeps the tensor with this key in memory.
    pub fn keeps(&self, py: Python<'_>, key: i64) -> PyResult<bool> {
        self.0.bind(py).getattr(intern!(py, "keep"))?.contains(key)
    }

    /// True if the last plan has the tensor with this key stay in pinned memory.
    pub fn pins(&self, py: Python<'_>, key: i64) -> PyResult<bool> {
        self.0.bind(py).getattr(intern!(py, "pinned"))?.contains(key)
    }

    /// True if the last plan has the tensor with this key made again from others.
    pub fn rematerializes(&self, py: Python<'_>, key: i64) -> PyResult<bool> {
        self.0.bind(py).getattr(intern!(py, "rematerialized"))?.contains(key)
    }

    /// True if tensors are made again from the tensor with this key.
    pub fn is_source(&self, py: Python<'_>, key: i64) -> PyResult<bool> {
        self.0.bind(py).getattr(intern!(py, "sources"))?.contains(key)
    }

    /// The moments of the tensor with this key, if the last plan has a tensor of a GPU with it.
    pub fn moments(&self, py: Python<'_>, key: i64) -> PyResult<Option<Moments>> {
        let known = self.0.bind(py).getattr(intern!(py, "moments"))?;
        let moments = known.cast::<PyDict>()?.get_item(key)?;
        moments.map(|moments| moments.extract()).transpose()
    }

    /// True if a plan was made with this key in it.
    pub fn knows(&self, py: Python<'_>, key: i64) -> PyResult<bool> {
        self.0.bind(py).call_method1(intern!(py, "knows"), (key,))?.is_truthy()
    }

    /// The number of plans that were made so far.
    pub fn made_count(&self, py: Python<'_>) -> PyResult<u64> {
        self.0.bind(py).getattr(intern!(py, "made_count"))?.extract()
    }

    /// The `Plan` for rounds of a signature, if there is one.
    pub fn plan<'py>(
        &self,
        py: Python<'py>,
        signature: i64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let plans = self.0.bind(py).getattr(intern!(py, "plans"))?;
        plans.cast::<PyDict>()?.get_item(signature)
    }

    /// The part of a `Plan` by which reads begin ahead of their needs.
    pub fn readahead_plan(plan: &Bound<'_, PyAny>) -> PyResult<core::round::Plan> {
        let py = plan.py();
        Ok(core::round::Plan {
            needed_s: plan.getattr(intern!(py, "needed_s"))?.extract()?,
            start_by_s: plan.getattr(intern!(py, "start_by_s"))?.extract()?,
            longest_gap_s: plan.getattr(intern!(py, "longest_gap_s"))?.extract()?,
        })
    }
}
