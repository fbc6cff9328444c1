//! The moments of each saved tensor, for a picture of a step; noted only once `start` was called.
//!
//! Locked with the GIL held, and for a change alone that calls nothing; see [Note: no calls] in
//! `writeback.rs`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;

/// Tensors that are remembered; older ones are forgotten.
const LIVES_MAX: usize = 200_000;

/// Nanoseconds since 1970, in the order of [`Moment`]; 0 for a moment that never came.
type Moments = [u64; 6];

/// A moment in the life of a saved tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Packed,
    WriteBegan,
    Freed,
    ReadBegan,
    Needed,
    Dropped,
}

/// The lives of the tensors of one session.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Timeline(Arc<Shared>);

#[derive(Default)]
struct Shared {
    is_on: AtomicBool,
    ended: Mutex<VecDeque<(i64, u64, Moments)>>,
}

/// The moments of one tensor; entered in the timeline as it ends.
pub struct Life(Option<Box<Noted>>);

struct Noted {
    shared: Arc<Shared>,
    key: i64,
    nbytes: u64,
    moments: Mutex<Moments>,
}

#[pymethods]
impl Timeline {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// Notes tensors that are packed from now on.
    fn start(&self) {
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    #[getter]
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Key, bytes and moments of each tensor that has ended.
    fn lives(&self) -> Vec<(i64, u64, Moments)> {
        lock(&self.0.ended).iter().copied().collect()
    }
}

impl Timeline {
    /// The life of a tensor that is packed now.
    pub fn begin(&self, key: i64, nbytes: u64) -> Life {
        if !self.is_on() {
            return Life(None);
        }
        let (shared, moments) = (Arc::clone(&self.0), Mutex::default());
        let life = Life(Some(Box::new(Noted { shared, key, nbytes, moments })));
        life.note(Moment::Packed);
        life
    }
}

impl Life {
    /// Notes that this happens now; the first time counts.
    pub fn note(&self, moment: Moment) {
        if let Some(noted) = &self.0 {
            let mut moments = lock(&noted.moments);
            let place = &mut moments[moment as usize];
            if *place == 0 {
                *place = now_ns();
            }
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.note(Moment::Dropped);
        if let Some(noted) = &self.0 {
            let life = (noted.key, noted.nbytes, *lock(&noted.moments));
            let mut ended = lock(&noted.shared.ended);
            if ended.len() == LIVES_MAX {
                ended.pop_front();
            }
            ended.push_back(life);
        }
    }
}

/// Nanoseconds since 1970, as the profiler of `PyTorch` counts them.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
