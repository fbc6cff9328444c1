//! Saved tensors that may be read ahead: their state, and the end of reads in vain.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core::rounds::Of;
use ssdtrain_core::window::Look;

use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound, is_dead};

/// The part of a bound, as a divisor, that a tensor which is made again and all its sources take;
/// `planning/rematerialize.py` chooses by it, too.
const RECIPES_SHARE: u64 = 8;

/// The bytes that reads ahead may take below a bound: recipes of the round should find room without
/// giving up reads.
pub fn room_for_reads(limit_bytes: u64, resident_bytes: u64, round: &SharedRound) -> u64 {
    let for_recipes = if round.lock().recipe_count > 0 { limit_bytes / RECIPES_SHARE } else { 0 };
    limit_bytes.saturating_sub(resident_bytes).saturating_sub(for_recipes)
}

/// Gives up tensors that were read ahead.
pub fn give_up(py: Python<'_>, given_up: &[Of<SavedReference>]) {
    for Of { round, ordinals } in given_up {
        for ordinal in ordinals {
            let reference = round.lock().entry(*ordinal).clone_ref(py);
            if let Some(saved) = saved_of(py, &reference) {
                drop(saved.get().set_ahead(None));
            }
        }
    }
}

/// The saved tensor, if it is alive.
pub fn saved_of<'py>(
    py: Python<'py>,
    reference: &SavedReference,
) -> Option<Bound<'py, SavedTensor>> {
    let saved = reference.bind(py).upgrade()?;
    Some(saved.cast_into().expect("rounds have references to saved tensors alone"))
}

/// The state of a tensor that could be read ahead.
pub fn look(py: Python<'_>, reference: &SavedReference) -> Look {
    let Some(saved) = saved_of(py, reference) else { return Look::Settled };
    let record = saved.get().record.get();
    if record.is_leaving(py) {
        return Look::Leaving;
    }
    match record.handle(py) {
        Some(handle) if !saved.get().is_ahead() => Look::OnDisk {
            key: record.key,
            slot_bytes: handle.get().slot_bytes() as u64,
            joins: handle.get().is_here(py),
        },
        _ => Look::Settled,
    }
}

/// Tensors that were read or made for another tensor, before their own nodes need them.
#[derive(Default)]
pub struct Early(Mutex<Vec<SavedReference>>);

impl Early {
    pub fn note(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        let (py, reference) = (saved.py(), PyWeakrefReference::new(saved)?.unbind());
        let known = self.take().into_iter().chain([reference]);
        let (dead, mut alive): (Vec<_>, Vec<_>) = known.partition(|known| is_dead(py, known));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).append(&mut alive);
        drop(dead);
        Ok(())
    }

    /// Lets their memory go: they are read or made again when they are needed.
    pub fn give_up(&self, py: Python<'_>) {
        for saved in self.take().iter().filter_map(|reference| saved_of(py, reference)) {
            drop(saved.get().set_ahead(None));
            saved.get().record.get().give_up_early();
        }
    }

    fn take(&self) -> Vec<SavedReference> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
