//! Saved tensors that may be read ahead: their state, and the end of reads in vain.

use pyo3::prelude::*;
use pyo3::types::PyWeakrefMethods;
use ssdtrain_core::rounds::Of;
use ssdtrain_core::window::Look;

use crate::saved_tensor::{SavedReference, SavedTensor};

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
