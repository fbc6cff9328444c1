//! A round as Python sees it, and what one teaches that has ended.

use pyo3::prelude::*;
use ssdtrain_core::round::Item;

use crate::gpu_clock::GpuTimes;
use crate::saved_tensor::{SharedRound, is_dead};

/// The fields of an item, in their order in Python.
type ItemFields = (i64, u64, f64, f64, Option<usize>);

/// What an ended round teaches. Times are in seconds, on the clock of the GPU that it was on, or on
/// that of the hooks; both stand still in waits for the disk.
#[pyclass(frozen, get_all, module = "ssdtrain._core")]
pub struct Learned {
    items: Vec<ItemFields>,
    began_s: f64,
    ended_s: f64,
    /// The waits for its tensors: of its GPU, or else of threads.
    stall_s: f64,
    /// Whether the times are those of a GPU.
    is_of_gpu: bool,
}

/// A round, for who learns from it.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Round(pub SharedRound);

#[pymethods]
impl Round {
    #[getter]
    fn phase(&self) -> i64 {
        self.0.lock().phase()
    }

    #[getter]
    fn signature(&self) -> i64 {
        self.0.lock().signature()
    }

    /// How many tensors were entered.
    #[getter]
    fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// Whether its backward has begun.
    #[getter]
    fn is_asked_for(&self) -> bool {
        self.0.lock().is_asked_for()
    }

    #[getter]
    fn is_finished(&self, py: Python<'_>) -> bool {
        self.0.lock().is_finished(|one| is_dead(py, one))
    }

    #[getter]
    fn opening(&self) -> i64 {
        self.0.lock().opening()
    }

    /// Whether it need not see what came after its first tensor.
    #[getter]
    fn is_skimmed(&self) -> bool {
        self.0.lock().is_skimmed()
    }

    /// Whether it lacks tensors that were not followed.
    #[getter]
    fn is_partial(&self) -> bool {
        self.0.lock().is_partial()
    }

    #[getter]
    fn hooks_s(&self) -> f64 {
        self.0.lock().hooks_s()
    }

    #[getter]
    fn span_s(&self) -> (f64, f64) {
        self.0.lock().span_s()
    }

    fn learned_items(&self) -> Vec<ItemFields> {
        self.0.lock().learned_items().iter().map(fields).collect()
    }

    fn heaviest_node(&self) -> (u64, u64, u64) {
        let heaviest = self.0.lock().heaviest_node();
        (heaviest.nbytes, heaviest.tensor_count, heaviest.all_bytes)
    }
}

impl Learned {
    /// By the clock of a GPU.
    pub fn of_gpu(times: &GpuTimes) -> Self {
        Self {
            items: times.items.iter().map(fields).collect(),
            began_s: 0.0,
            ended_s: times.ended_s,
            stall_s: times.stall_s,
            is_of_gpu: true,
        }
    }

    /// By the moments of the hooks, which do not tell how long a GPU computes.
    pub fn of_hooks(round: &Round, items: &[Item]) -> Self {
        let ((began_s, ended_s), stall_s) = {
            let round = round.0.lock();
            (round.span_s(), round.stall_s())
        };
        Self {
            items: items.iter().map(fields).collect(),
            began_s,
            ended_s,
            stall_s,
            is_of_gpu: false,
        }
    }
}

fn fields(item: &Item) -> ItemFields {
    (item.key, item.nbytes, item.packed_s, item.needed_s, item.gpu)
}
