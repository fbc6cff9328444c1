//! The writes that are under way, and the memory that they free when they end.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core as core;

use crate::gate::RecordReference;
use crate::partners::Writing;
use crate::record::Record;
use crate::timeline::Moment;
use crate::transfer::Handle;

/// Writes that a hook frees at most: bounds the work of one call.
const REAP_MAX: usize = 64;
/// The writes of a session that were begun and not seen to end, in the order of their beginning.
///
/// Locked as [Note: no calls] in `writeback.rs` says.
pub struct Writes {
    /// Once writes have freed this many bytes, free memory goes back to the system.
    give_back_bytes: u64,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    writing: VecDeque<RecordReference>,
    /// The place of the write behind the oldest that was looked at last.
    look_at: usize,
    /// The bytes of sources freed since memory was given back last.
    freed_bytes: u64,
}

impl Writes {
    pub fn new(give_back_bytes: u64) -> Self {
        Self { give_back_bytes, list: Mutex::default() }
    }

    pub fn add(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        let reference = PyWeakrefReference::new(record)?.unbind();
        self.list().writing.push_back(reference);
        Ok(())
    }

    pub fn count(&self) -> usize {
        self.list().writing.len()
    }

    /// The handles of the writes under way, the oldest first.
    pub fn under_way<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, Handle>>> {
        let mut handles = Vec::new();
        for reference in self.all(py) {
            handles.extend(upgraded(py, &reference)?.and_then(|record| record.get().handle(py)));
        }
        Ok(handles)
    }

    /// Cancels writes that have not begun; their tensors are kept.
    pub fn cancel_queued(&self, py: Python<'_>) -> PyResult<()> {
        for reference in self.all(py) {
            if let Some(record) = upgraded(py, &reference)?
                && let Some(handle) = record.get().handle(py)
                && handle.get().cancel(py)
            {
                record.get().set_handle(None);
            }
        }
        Ok(())
    }

    /// Frees the memory of all writes that have ended, however many.
    pub fn end_all(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        for reference in self.all(writing.py()) {
            if self.take_ended(&reference, writing)? {
                self.forget(&reference);
            }
        }
        Ok(())
    }

    /// Waits for the oldest write that can end now, and ends it; `false` if there is none.
    pub fn end_oldest(&self, writing: Writing<'_, '_>) -> PyResult<bool> {
        let (py, mut place) = (writing.py(), 0);
        while let Some(reference) = self.at(py, place) {
            if let Some(record) = upgraded(py, &reference)?
                && let Some((source, handle)) = under_way(py, &record)
            {
                if self.end_write(&record, &source, &handle, writing)? {
                    return Ok(true);
                }
                place += 1;
                continue;
            }
            self.forget(&reference);
        }
        Ok(false)
    }

    /// Frees the memory of writes that have ended, [`REAP_MAX`] of them at most.
    ///
    /// Writes end nearly in order, so the oldest is looked at first. A write that hangs must not
    /// hold the others back, so each call looks at one more of them.
    pub fn reap(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        let py = writing.py();
        for _ in 0..REAP_MAX {
            let Some(reference) = self.at(py, 0) else { return Ok(()) };
            if !self.take_ended(&reference, writing)? {
                let another = self.list().next_looked_at(py);
                if let Some(another) = another
                    && self.take_ended(&another, writing)?
                {
                    self.forget(&another);
                }
                return Ok(());
            }
            self.forget(&reference);
        }
        Ok(())
    }

    /// Ends a write that is done; `false` if it is still under way.
    fn take_ended(&self, reference: &RecordReference, writing: Writing<'_, '_>) -> PyResult<bool> {
        let py = writing.py();
        let Some(record) = upgraded(py, reference)? else { return Ok(true) };
        let Some((source, handle)) = under_way(py, &record) else { return Ok(true) };
        Ok(handle.get().is_done(py) && self.end_write(&record, &source, &handle, writing)?)
    }

    /// Waits for a write and frees its source, unless its bytes changed on the way; `false` if no
    /// wait helps (see [`Handle::ended`]).
    fn end_write(
        &self,
        record: &Bound<'_, Record>,
        source: &Bound<'_, PyAny>,
        handle: &Bound<'_, Handle>,
        writing: Writing<'_, '_>,
    ) -> PyResult<bool> {
        let (py, this) = (record.py(), record.get());
        match handle.get().ended(py)? {
            Ok(false) => return Ok(false),
            Ok(true) if this.is_unchanged(source, handle.get())? => {
                this.free_source();
                this.life.note(Moment::Freed);
                if self.is_time_to_give_back(this.nbytes) {
                    writing.give_memory_back()?;
                }
            }
            // The bytes on the disk are not those that were saved. Plain autograd would use the
            // source, and unpack raises if it was changed in place.
            Ok(true) => this.set_handle(None),
            Err(error) => {
                // The source is still here, so nothing is lost.
                this.set_handle(None);
                // It was cancelled, or the store was closed while the graph lived: no failure.
                if !matches!(error.kind(), core::ErrorKind::Cancelled | core::ErrorKind::Closed) {
                    this.holding.set_fate(core::Fate::Kept);
                    writing.note_failure(&error)?;
                }
            }
        }
        Ok(true)
    }

    /// Takes a write that has ended out of the list; it is mostly the first.
    fn forget(&self, reference: &RecordReference) {
        let mut list = self.list();
        let place = list.writing.iter().position(|known| known.is(reference));
        let taken = place.and_then(|place| list.writing.remove(place));
        drop(list);
        drop(taken);
    }

    fn is_time_to_give_back(&self, nbytes: u64) -> bool {
        let mut list = self.list();
        list.freed_bytes += nbytes;
        let is_time = list.freed_bytes >= self.give_back_bytes;
        if is_time {
            list.freed_bytes = 0;
        }
        is_time
    }

    /// The write at a place behind the oldest.
    fn at(&self, py: Python<'_>, place: usize) -> Option<RecordReference> {
        self.list().writing.get(place).map(|known| known.clone_ref(py))
    }

    fn all(&self, py: Python<'_>) -> Vec<RecordReference> {
        self.list().writing.iter().map(|known| known.clone_ref(py)).collect()
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl List {
    fn next_looked_at(&mut self, py: Python<'_>) -> Option<RecordReference> {
        self.look_at = (self.look_at + 1) % self.writing.len().max(1);
        self.writing.get(self.look_at).map(|known| known.clone_ref(py))
    }
}

/// The record, while it lives.
pub fn upgraded<'py>(
    py: Python<'py>,
    reference: &RecordReference,
) -> PyResult<Option<Bound<'py, Record>>> {
    reference.bind(py).upgrade_as::<Record>()
}

/// Source and handle of a record that is on its way to the disk.
fn under_way<'py>(
    py: Python<'py>,
    record: &Bound<'py, Record>,
) -> Option<(Bound<'py, PyAny>, Bound<'py, Handle>)> {
    let record = record.get();
    Some((record.source(py)?, record.handle(py)?))
}
