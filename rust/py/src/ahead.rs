//! Reads ahead of their needs: their beginning, and the end of reads in vain.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use ssdtrain_core::rounds::Of;
use ssdtrain_core::window::{Look, Walk};

use crate::error::SsdtrainError;
use crate::partners::Prefetching;
use crate::rounds::Rounds;
use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound, is_dead};
use crate::store::Store;
use crate::timeline::Moment;
use crate::transfer::Handle;

/// The part of a bound, as a divisor, that a tensor which is made again and all its sources take;
/// `planning/rematerialize.py` chooses by it, too.
const RECIPES_SHARE: u64 = 8;

/// The bytes that reads ahead may take below a bound: recipes of the round should find room without
/// giving up reads.
fn room_for_reads(limit_bytes: u64, resident_bytes: u64, round: &SharedRound) -> u64 {
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

impl Rounds {
    /// Gives up tensors that were read ahead, and reads those ahead whose turn has come.
    pub fn read_ahead(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        given_up: &[Of<SavedReference>],
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        give_up(py, given_up);
        if self.limit_bytes.is_some() {
            // Small tensors must not take the room that is found here before the reads do.
            self.account.limit_small(0);
        }
        let on_gpus = self.gpus.as_ref().map_or(0, |gpus| gpus.get().loaded_bytes());
        let transfer_bytes = self.store.get().transfer_bytes(py) + on_gpus;
        let resident_bytes = self.account.held_bytes() + transfer_bytes;
        let limit_bytes = self.limit_bytes.unwrap_or_else(|| self.account.soft_limit_bytes());
        let room_bytes = room_for_reads(limit_bytes, resident_bytes, round);
        let mut walk = self.books().rounds.walk(round, resident_bytes, room_bytes);
        let mut together = Together::default();
        while let Some(ordinal) = self.next(py, round, &mut walk, &together) {
            let reference = round.lock().entry(ordinal).clone_ref(py);
            let is_begun =
                together.takes(py, &reference) || self.begin_ahead(py, &reference, prefetching)?;
            if !self.books().rounds.note(round, &mut walk, ordinal, is_begun) {
                // A handler of a signal ran in these calls: its backward has the window now.
                give_up(py, &[Of { round: round.clone(), ordinals: vec![ordinal] }]);
                return Ok(());
            }
        }
        match together.begin(py, self.store.get()) {
            Ok(refusals) => refusals.iter().try_for_each(|error| prefetching.note_refused(error)),
            Err(error) if self.is_out_of_memory(py, &error) => {
                self.fall_short(py, round, &error, prefetching)
            }
            Err(error) => Err(error),
        }
    }

    fn next(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        walk: &mut Walk,
        together: &Together<'_>,
    ) -> Option<usize> {
        self.books().rounds.next(round, walk, |saved| together.look(py, saved))
    }

    /// Gives all reads ahead of this backward up, because a GPU has no memory left for one.
    ///
    /// Each further attempt would empty the allocator's cache. The rest of this backward reads each
    /// tensor when a node needs it.
    fn fall_short(
        &self,
        py: Python<'_>,
        round: &SharedRound,
        error: &PyErr,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        let before = self.books().short.replace(round.clone());
        drop(before);
        self.give_way(py);
        prefetching.note_refused(error)
    }

    /// Begins a read ahead. An error is only logged, because the read on demand meets it again and
    /// raises it.
    fn begin_ahead(
        &self,
        py: Python<'_>,
        reference: &SavedReference,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<bool> {
        let Some(saved) = reference.bind(py).upgrade_as::<SavedTensor>()? else {
            return Ok(false);
        };
        let Some(handle) = saved.get().record.get().handle(py) else { return Ok(false) };
        match Handle::begin_read(&handle, self.store.get()) {
            Ok(loading) => {
                saved.get().record.get().life.note(Moment::ReadBegan);
                drop(saved.get().set_ahead(Some(loading)));
                Ok(true)
            }
            Err(error) if error.is_instance_of::<SsdtrainError>(py) => {
                prefetching.note_refused(&error)?;
                Ok(false)
            }
            Err(error) if self.is_out_of_memory(py, &error) => {
                let Some((round, _)) = saved.get().place() else { return Ok(false) };
                self.fall_short(py, round, &error, prefetching)?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// Reads ahead of tensors of one GPU, which begin together: the driver is asked and told once for
/// all.
#[derive(Default)]
struct Together<'py> {
    saved: Vec<Bound<'py, SavedTensor>>,
    handles: Vec<Bound<'py, Handle>>,
    /// Tensors on the bytes that these bring.
    joining: Vec<(Bound<'py, SavedTensor>, Bound<'py, Handle>)>,
}

impl<'py> Together<'py> {
    /// Takes a tensor whose read can begin with the others.
    fn takes(&mut self, py: Python<'py>, reference: &SavedReference) -> bool {
        let Some(saved) = saved_of(py, reference) else { return false };
        let Some(handle) = saved.get().record.get().handle(py) else { return false };
        if self.brings(&handle) {
            self.joining.push((saved, handle));
            return true;
        }
        let takes = handle.get().reads_with(py, &self.handles);
        if takes {
            self.saved.push(saved);
            self.handles.push(handle);
        }
        takes
    }

    /// Begins the reads; returns the errors of those that did not begin. The first error of the
    /// allocator is raised, and then none has begun.
    fn begin(self, py: Python<'py>, store: &Store) -> PyResult<Vec<PyErr>> {
        let mut begun = Handle::begin_reads(py, &self.handles)?;
        begun.extend(self.joining.iter().map(|(_, handle)| Handle::begin_read(handle, store)));
        let saved = self.saved.iter().chain(self.joining.iter().map(|(saved, _)| saved));
        let mut refusals = Vec::new();
        for (saved, loading) in saved.zip(begun) {
            match loading {
                Ok(loading) => {
                    saved.get().record.get().life.note(Moment::ReadBegan);
                    drop(saved.get().set_ahead(Some(loading)));
                }
                Err(error) if error.is_instance_of::<SsdtrainError>(py) => refusals.push(error),
                Err(error) => return Err(error),
            }
        }
        Ok(refusals)
    }

    /// The state of a tensor that could be read ahead.
    fn look(&self, py: Python<'_>, reference: &SavedReference) -> Look {
        match look(py, reference) {
            Look::OnDisk { key, slot_bytes, joins } => {
                let handle =
                    saved_of(py, reference).and_then(|saved| saved.get().record.get().handle(py));
                let joins = joins || handle.is_some_and(|handle| self.brings(&handle));
                Look::OnDisk { key, slot_bytes, joins }
            }
            other => other,
        }
    }

    fn brings(&self, handle: &Bound<'_, Handle>) -> bool {
        self.handles.iter().any(|known| known.is(handle))
    }
}

fn look(py: Python<'_>, reference: &SavedReference) -> Look {
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

/// Tensors that were read or made, and that no node uses now: they came for another tensor, before
/// their own nodes need them, or their node has ended and a graph that is retained may need them.
#[derive(Default)]
pub struct Early {
    idle: Mutex<Vec<SavedReference>>,
    /// Those that were made for the node that runs now.
    in_use: Mutex<Vec<SavedReference>>,
}

impl Early {
    pub fn note(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        let (py, reference) = (saved.py(), PyWeakrefReference::new(saved)?.unbind());
        let known = take(&self.idle).into_iter().chain([reference]);
        let (dead, mut alive): (Vec<_>, Vec<_>) = known.partition(|known| is_dead(py, known));
        locked(&self.idle).append(&mut alive);
        drop(dead);
        Ok(())
    }

    /// Notes a tensor that was made for its own node.
    pub fn note_in_use(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        let reference = PyWeakrefReference::new(saved)?.unbind();
        locked(&self.in_use).push(reference);
        Ok(())
    }

    /// Notes that the node with this sequence number runs, so that all others have ended.
    pub fn begin_node(&self, py: Python<'_>, sequence: i64) -> PyResult<()> {
        for reference in take(&self.in_use) {
            let Some(saved) = saved_of(py, &reference) else { continue };
            if saved.get().sequence == sequence {
                locked(&self.in_use).push(reference);
            } else if saved.get().record.get().note_node_ended() {
                self.note(&saved)?;
            }
        }
        Ok(())
    }

    /// Lets their memory go: they are read or made again when they are needed.
    pub fn give_up(&self, py: Python<'_>) {
        for saved in take(&self.idle).iter().filter_map(|reference| saved_of(py, reference)) {
            drop(saved.get().set_ahead(None));
            saved.get().record.get().give_up_idle();
        }
    }
}

fn take(list: &Mutex<Vec<SavedReference>>) -> Vec<SavedReference> {
    std::mem::take(&mut *locked(list))
}

fn locked(list: &Mutex<Vec<SavedReference>>) -> MutexGuard<'_, Vec<SavedReference>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
