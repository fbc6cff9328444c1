//! Saved tensors that are made again from others instead of being kept or moved.
//!
//! `activations/rematerializer.py` finds the recipes, proves them, and makes the tensors.

use std::time::Instant;

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core as core;
use ssdtrain_core::cuda::hook;

use crate::gpu_calls::GpuStream;
use crate::offloading::Offloading;
use crate::record::{Made, Recipe, Record};
use crate::saved_tensor::SavedTensor;
use crate::transfer::Handle;

impl Offloading {
    /// Finds the recipe of a tensor that a forward has saved, if the plan asks for it; `true` if it
    /// replaces the bytes.
    pub fn has_recipe<'py>(
        slf: &Bound<'py, Self>,
        saved: &Bound<'py, SavedTensor>,
        tensor: &Bound<'py, PyAny>,
        is_new: bool,
    ) -> PyResult<bool> {
        let own = slf.get();
        if saved.get().record.get().is_lent() {
            return Ok(false);
        }
        let Some((recipe, replaces)) = own.session.recipe(saved, tensor, is_new, slf)? else {
            return Ok(false);
        };
        if let Some((round, _)) = saved.get().place() {
            round.lock().recipe_count += 1;
        }
        let record = saved.get().record.get();
        if replaces {
            own.eligible.get().add(record.nbytes);
            record.use_recipe(recipe);
        } else {
            record.try_recipe(recipe);
        }
        Ok(replaces)
    }

    /// Makes a saved tensor again from others, for all nodes that need its bytes.
    ///
    /// Room for an early need, by which another tensor is made, was made with that of the other.
    pub fn rematerialize<'py>(
        slf: &Bound<'py, Self>,
        saved: &Bound<'py, SavedTensor>,
        recipe: &Bound<'py, PyAny>,
        is_early: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (own, py, this) = (slf.get(), slf.py(), saved.get());
        let record = this.record.get();
        let unpack = slf.getattr(intern!(py, "unpack_source"))?;
        hook::forget();
        own.lock.locked(py, || {
            if own.records.get().is_bounded() && !is_early {
                own.session.prefetching(py).make_room_to_make(saved)?;
            }
            record.begin_making();
            own.note_peak(py);
            Ok(())
        })?;
        let mut made = own.session.rematerialize(saved, recipe, &unpack);
        if let Err(error) = &made
            && own.rounds.get().is_out_of_memory(py, error)
        {
            own.lock.locked(py, || own.let_all_go(py))?;
            made = own.session.rematerialize(saved, recipe, &unpack);
        }
        if made.is_err() {
            record.give_up_making();
        }
        let made = made?;
        let stream = own.stream(py, this.layout.gpu)?;
        own.lock.locked(py, || record.take_made(&made, stream, is_early))?;
        if is_early {
            own.note_early(saved)?;
        } else {
            own.note_in_use(saved)?;
        }
        this.on_memory(own.torch.get(), &made.call_method0(intern!(py, "untyped_storage"))?)
    }

    /// Compares the recipe of a saved tensor, if it has one to prove, with its bytes. Not while
    /// another tensor is made from it: a chain of tensors would be proved, and made, at once.
    pub fn prove(
        slf: &Bound<'_, Self>,
        saved: &Bound<'_, SavedTensor>,
        tensor: &Bound<'_, PyAny>,
        is_early: bool,
    ) -> PyResult<()> {
        if is_early {
            return Ok(());
        }
        let Some(recipe) = saved.get().record.get().take_unproved() else { return Ok(()) };
        let (own, py, began) = (slf.get(), slf.py(), Instant::now());
        let waited_before = own.rounds.get().waited(py)?;
        hook::forget();
        let bring = slf.getattr(intern!(py, "bring"))?;
        let proved = own.session.prove(saved, &recipe, tensor, &bring);
        let waited = own.rounds.get().waited(py)?.saturating_sub(waited_before);
        own.rounds.get().count_proved(saved.get(), began.elapsed().saturating_sub(waited));
        proved
    }

    /// Brings a tensor from which a proof makes another. No round has a need of it.
    pub fn bring(slf: &Bound<'_, Self>, packed: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (own, py) = (slf.get(), packed.py());
        let Ok(saved) = packed.cast::<SavedTensor>() else {
            return own.session.unpack_kept(packed).map(Bound::unbind);
        };
        let (this, record) = (saved.get(), saved.get().record.bind(py));
        if !this.is_unchanged(py)? {
            own.session.refuse_changed(saved)?;
        }
        if record.get().used_recipe(py).is_some() {
            return Self::unpack_for(slf, packed, true);
        }
        let writing = own.session.writing(py);
        let in_memory = || own.records.get().in_memory(record, writing);
        if let Some(storage) = own.lock.locked(py, in_memory)? {
            return this.on_memory(own.torch.get(), &storage).map(Bound::unbind);
        }
        let handle = record.get().handle(py).ok_or_else(|| {
            PyRuntimeError::new_err("a record has its bytes in memory, a handle or a recipe")
        })?;
        let loading = Handle::begin_read(&handle, own.records.get().store())?;
        let loading = loading.bind(py);
        loading.call_method0(intern!(py, "wait"))?;
        let tensor = loading.get().restore(py, own.torch.get(), &this.layout)?;
        this.counted(&tensor).map(Bound::unbind)
    }
}

impl Record {
    /// Lets the memory go: the bytes will be made again by this recipe.
    pub fn use_recipe(&self, recipe: Py<PyAny>) {
        let source = {
            let mut state = self.state();
            state.recipe = Recipe::Used(recipe);
            state.source.take()
        };
        self.holding.free(core::Fate::Rematerialized);
        drop(source);
    }

    /// The recipe by which its bytes are made again.
    pub fn used_recipe<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match &self.state().recipe {
            Recipe::Used(recipe) => Some(recipe.bind(py).clone()),
            _ => None,
        }
    }

    /// True if a node on this stream has to make bytes of its own, because nothing orders it after
    /// the stream of the record, on which they are made for all others.
    pub fn is_made_apart(&self, stream: Option<GpuStream>) -> bool {
        stream != self.stream && matches!(self.state().recipe, Recipe::Used(_))
    }

    /// Counts the bytes that are about to be made again.
    pub fn begin_making(&self) {
        self.holding.take_back();
    }

    /// Counts them no more: they were not made, or serve others alone.
    pub fn give_up_making(&self) {
        if !self.has_source() {
            self.holding.free(core::Fate::Rematerialized);
        }
    }

    /// Takes bytes that were made again on this stream, for all nodes that still need them.
    pub fn take_made(
        &self,
        made: &Bound<'_, PyAny>,
        stream: Option<GpuStream>,
        is_early: bool,
    ) -> PyResult<()> {
        if self.is_made_apart(stream) {
            self.give_up_making();
            return Ok(());
        }
        let source = self.counted(made)?.unbind();
        let before = {
            let mut state = self.state();
            state.made = if is_early { Made::Idle } else { Made::InUse };
            state.source.replace(source)
        };
        drop(before);
        Ok(())
    }

    /// Notes that an own node needs the bytes, which are then in use; true if they were made again.
    pub fn note_own_need(&self) -> bool {
        let mut state = self.state();
        if state.made == Made::Idle {
            state.made = Made::InUse;
        }
        state.made == Made::InUse
    }

    /// Notes that the node which used the bytes has ended; true if they were made again.
    pub fn note_node_ended(&self) -> bool {
        let mut state = self.state();
        if state.made == Made::InUse {
            state.made = Made::Idle;
        }
        state.made == Made::Idle
    }

    /// Lets bytes go that were made and are not in use; they can be made again.
    pub fn give_up_idle(&self) {
        let source = {
            let mut state = self.state();
            if state.made == Made::Idle {
                state.made = Made::Not;
                state.source.take()
            } else {
                None
            }
        };
        if source.is_some() {
            self.holding.free(core::Fate::Rematerialized);
        }
        drop(source);
    }
}
