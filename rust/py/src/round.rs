//! Classes of Python for a round, and for the times of a round that has ended.

use pyo3::prelude::*;
use ssdtrain_core::round::Item;

use crate::gpu_clock::GpuTimes;
use crate::saved_tensor::{SharedRound, is_dead};

/// The fields of an item, in their order in Python.
type ItemFields = (i64, u64, f64, f64, Option<usize>);

/// The times of an ended round, in seconds, on the clock of its GPU or on that of the hooks; both
/// stand still in waits for the disk.
#[pyclass(frozen, get_all, module = "ssdtrain._core")]
pub struct Learned {
    items: Vec<ItemFields>,
    /// By key, the ends of copies from its GPU.
    copied: Vec<(i64, f64)>,
    began_s: f64,
    ended_s: f64,
    /// The waits for its tensors to come back: of its GPU, or else of threads.
    load_stall_s: f64,
    /// The same with the waits of its GPU for copies that should have ended by the plan.
    stall_s: f64,
    /// True if the times are those of a GPU.
    is_of_gpu: bool,
    /// True if that GPU waited for Python.
    waits_for_python: bool,
}

/// A round, for `Prefetcher`, which learns from it.
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

    /// The number of its tensors.
    #[getter]
    fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// True if its backward has begun.
    #[getter]
    fn is_asked_for(&self) -> bool {
        self.0.lock().is_asked_for()
    }

    #[getter]
    fn is_finished(&self, py: Python<'_>) -> bool {
        self.0.lock().is_finished(|saved| is_dead(py, saved))
    }

    #[getter]
    fn opening(&self) -> i64 {
        self.0.lock().opening()
    }

    /// The number of plans that had been made when it began.
    #[getter]
    fn plan_count(&self) -> u64 {
        self.0.lock().plan_count()
    }

    /// True if only its first tensor is followed.
    #[getter]
    fn is_skimmed(&self) -> bool {
        self.0.lock().is_skimmed()
    }

    /// True if tensors that stay by the plan were not followed.
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
    /// The times by the clock of a GPU.
    pub fn of_gpu(times: &GpuTimes) -> Self {
        Self {
            items: times.items.iter().map(fields).collect(),
            copied: times.copied.clone(),
            began_s: 0.0,
            ended_s: times.ended_s,
            load_stall_s: times.load_stall_s,
            stall_s: times.stall_s,
            is_of_gpu: true,
            waits_for_python: times.waits_for_python,
        }
    }

    /// The times by the moments of the hooks, which do not show how long a GPU computes.
    pub fn of_hooks(round: &Round, items: &[Item]) -> Self {
        let ((began_s, ended_s), stall_s) = {
            let round = round.0.lock();
            (round.span_s(), round.stall_s())
        };
        Self {
            items: items.iter().map(fields).collect(),
            copied: Vec::new(),
            began_s,
            ended_s,
            load_stall_s: stall_s,
            stall_s,
            is_of_gpu: false,
            waits_for_python: false,
        }
    }
}

fn fields(item: &Item) -> ItemFields {
    (item.key, item.nbytes, item.packed_s, item.needed_s, item.gpu)
}
