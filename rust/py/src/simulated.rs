//! `SimulatedDisk`: the seeded plan of a disk that fails, and the switch that stops it, for tests.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ssdtrain_core::{Faults, PauseSwitch};

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct SimulatedDisk(Faults);

impl SimulatedDisk {
    /// The plan; it shares the switch of this object.
    pub fn faults(&self) -> Faults {
        self.0.clone()
    }
}

#[pymethods]
impl SimulatedDisk {
    #[new]
    #[pyo3(signature = (**faults))]
    fn new(faults: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut plan = Faults::default();
        for (key, value) in faults.into_iter().flatten() {
            match key.extract::<String>()?.as_str() {
                "seed" => plan.seed = value.extract()?,
                "short_rate" => plan.short_rate = value.extract()?,
                "zero_rate" => plan.zero_rate = value.extract()?,
                "io_error_rate" => plan.io_error_rate = value.extract()?,
                "space_error_rate" => plan.space_error_rate = value.extract()?,
                "retry_rate" => plan.retry_rate = value.extract()?,
                "bit_flip_rate" => plan.bit_flip_rate = value.extract()?,
                "late_rate" => plan.late_rate = value.extract()?,
                "capacity_bytes" => plan.capacity_bytes = value.extract()?,
                "gone_after_count" => plan.gone_after_count = value.extract()?,
                "paused" if value.extract()? => plan.pause = PauseSwitch::paused(),
                "paused" => plan.pause = PauseSwitch::default(),
                other => {
                    return Err(PyValueError::new_err(format!("no fault is called {other}")));
                }
            }
        }
        Ok(Self(plan))
    }

    fn pause(&self) {
        self.0.pause.pause();
    }

    fn resume(&self) {
        self.0.pause.resume();
    }
}
