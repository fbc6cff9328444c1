//! Pack and unpack of tensors whose bytes may leave memory.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core::cuda::hook::{self, Hook};
use ssdtrain_core::round::FORWARD;

use crate::by_plan::{ByPlan, Use};
use crate::geometry::{Layout, is_memory_of_others, shares_no_counter};
use crate::gpu::user_stream;
use crate::gpu_calls::GpuStream;
use crate::kept::is_true;
use crate::partners::{KeepReason, SessionHooks};
use crate::record::{Part, Record};
use crate::rounds::Rounds;
use crate::saved_tensor::{SavedTensor, SharedRound};
use crate::session_lock::SessionLock;
use crate::tally::Tally;
use crate::torch::Torch;
use crate::transfer::Loading;
use crate::writeback::Records;

/// Pack and unpack of one session.
///
/// The lock of the session is held while the books change, and never while a thread waits for a
/// read or for a GPU.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Offloading {
    pub torch: Py<Torch>,
    pub records: Py<Records>,
    pub rounds: Py<Rounds>,
    min_bytes: u64,
    pub lock: SessionLock,
    pub session: SessionHooks,
    pub eligible: Py<Tally>,
    pub planned: Py<Tally>,
    /// The last backward that began under the bound of a GPU.
    begun: AtomicI64,
}

/// The bytes of a saved tensor that a node needs: in memory, or the way to bring them.
enum Found<'py> {
    InMemory(Bound<'py, PyAny>),
    Read(Bound<'py, Loading>),
    /// The recipe by which they are made again.
    Recipe(Bound<'py, PyAny>),
}

#[pymethods]
impl Offloading {
    #[new]
    #[pyo3(signature = (
        torch, records, rounds, *, min_bytes, lock, hooks, eligible, planned
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        torch: Py<Torch>,
        records: Py<Records>,
        rounds: Py<Rounds>,
        min_bytes: u64,
        lock: &Bound<'_, PyAny>,
        hooks: &Bound<'_, PyAny>,
        eligible: Py<Tally>,
        planned: Py<Tally>,
    ) -> PyResult<Self> {
        Ok(Self {
            torch,
            records,
            rounds,
            min_bytes,
            lock: SessionLock::new(lock)?,
            session: SessionHooks::new(hooks)?,
            eligible,
            planned,
            begun: AtomicI64::new(FORWARD),
        })
    }

    fn pack(slf: &Bound<'_, Self>, tensor: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        Self::pack_plain(slf, tensor, false)
    }

    pub fn unpack(slf: &Bound<'_, Self>, packed: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        Self::unpack_for(slf, packed, false)
    }

    /// Unpacks a tensor from which another is made; what was read stays for its own node.
    fn unpack_source(slf: &Bound<'_, Self>, packed: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        Self::unpack_for(slf, packed, true)
    }

    /// Packs a narrow copy of a tensor, during the pack of that tensor; `None` if it is small.
    fn pack_narrow(
        slf: &Bound<'_, Self>,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let storage = tensor.call_method0(intern!(slf.py(), "untyped_storage"))?;
        let nbytes: u64 = storage.call_method0(intern!(slf.py(), "nbytes"))?.extract()?;
        if nbytes < slf.get().min_bytes {
            return Ok(None);
        }
        let layout = Layout::of(tensor)?;
        Self::offload(slf, tensor, &storage, layout, 0, nbytes, true).map(|it| Some(it.unbind()))
    }

    /// Brings a tensor from which a proof makes another. No round has a need of it.
    #[pyo3(name = "bring")]
    fn py_bring(slf: &Bound<'_, Self>, packed: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        Self::bring(slf, packed)
    }
}

impl Offloading {
    pub fn unpack_for(
        slf: &Bound<'_, Self>,
        packed: &Bound<'_, PyAny>,
        stays_ahead: bool,
    ) -> PyResult<Py<PyAny>> {
        let own = slf.get();
        let (py, session, began) = (packed.py(), &own.session, Instant::now());
        let _hook = Hook::enter();
        let Ok(saved) = packed.cast::<SavedTensor>() else {
            // A `Kept` comes here if it has changed, or is needed inside an operation.
            return session.unpack_kept(packed).map(Bound::unbind);
        };
        let this = saved.get();
        if !this.is_unchanged(py)? {
            // defence: version at unpack
            session.refuse_changed(saved)?;
        }
        if own.records.get().is_forked() {
            return session.unpack_in_child(saved).map(Bound::unbind);
        }
        let other_before = own.rounds.get().taught_and_waited(py)?;
        let tensor = match own.lock.locked(py, || own.find(saved, stays_ahead))? {
            Found::InMemory(storage) => match this.original(own.torch.get(), &storage)? {
                Some(original) => original,
                None => this.on_memory(own.torch.get(), &storage)?,
            },
            Found::Read(loading) => {
                own.note_hook(saved, began, other_before)?;
                // defence: no lock while waiting for a read
                let tensor = own.read(saved, &loading)?;
                if stays_ahead {
                    drop(this.set_ahead(Some(loading.unbind())));
                    own.note_early(saved)?;
                }
                Self::prove(slf, saved, &tensor, stays_ahead)?;
                return Ok(tensor.unbind());
            }
            Found::Recipe(recipe) => {
                own.note_hook(saved, began, other_before)?;
                return Self::rematerialize(slf, saved, &recipe, stays_ahead).map(Bound::unbind);
            }
        };
        Self::prove(slf, saved, &tensor, stays_ahead)?;
        own.note_hook(saved, began, other_before)?;
        Ok(tensor.unbind())
    }

    /// Packs a plain tensor that is no weight. With `may_pass_by` it may be kept as small tensors
    /// are, if its round is skimmed.
    pub fn pack_plain(
        slf: &Bound<'_, Self>,
        tensor: &Bound<'_, PyAny>,
        may_pass_by: bool,
    ) -> PyResult<Py<PyAny>> {
        let own = slf.get();
        let (py, began) = (tensor.py(), Instant::now());
        if own.records.get().is_forked() {
            return own.session.exclude(tensor).map(Bound::unbind);
        }
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let storage_bytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        // Most small tensors have a small storage, and cost no more than a look at it.
        if storage_bytes < own.min_bytes {
            return own.keep(tensor, KeepReason::Small, storage_bytes, storage_bytes);
        }
        let layout = Layout::of(tensor)?;
        let (start, nbytes) = layout.part(tensor, storage_bytes)?;
        if let Some(reason) = own.keep_reason(tensor, &storage, nbytes, storage_bytes)? {
            let (records, writing) = (own.records.get(), own.session.writing(py));
            let known = records.of(&storage)?;
            if !known.is_empty() {
                let part = (layout.offset, start + nbytes);
                own.lock.locked(py, || records.renew(&known, tensor, &storage, part, writing))?;
            }
            let packed = own.keep(tensor, reason, nbytes, storage_bytes)?;
            // A `keep` that returns `None` has the tensor offloaded.
            if !packed.is_none(py) {
                return Ok(packed);
            }
        }
        if may_pass_by && own.rounds.get().skims(py) {
            let identity = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let is_leaf = is_true(tensor, intern!(py, "is_leaf"))?;
            let part = own.counted_part(py, start, nbytes, storage_bytes)?;
            if let Some(kept) = own.pass_by(tensor, identity, part, is_leaf)? {
                return Ok(kept.into_any());
            }
        }
        let other_before = own.rounds.get().taught_and_waited(py)?;
        let packed = own
            .lock
            .locked(py, || Self::offload(slf, tensor, &storage, layout, start, nbytes, false))?;
        if let Ok(saved) = packed.cast::<SavedTensor>() {
            own.note_hook(saved, began, other_before)?;
        }
        Ok(packed.unbind())
    }

    /// Counts the time of a hook since `began`, less the time that hooks have spent since then on
    /// learning and waiting; `other_before` was their time for these at `began`.
    fn note_hook(
        &self,
        saved: &Bound<'_, SavedTensor>,
        began: Instant,
        other_before: Duration,
    ) -> PyResult<()> {
        let other = self.rounds.get().taught_and_waited(saved.py())?.saturating_sub(other_before);
        saved.get().note_hook(began.elapsed().saturating_sub(other));
        Ok(())
    }

    /// The reason for which a part of a large storage stays in memory; `None` if it may leave.
    pub fn keep_reason(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        nbytes: u64,
        storage_bytes: u64,
    ) -> PyResult<Option<KeepReason>> {
        if nbytes < self.min_bytes {
            return Ok(Some(KeepReason::Small));
        }
        if shares_no_counter(tensor, storage_bytes)? {
            let has_history = !tensor.getattr(intern!(tensor.py(), "grad_fn"))?.is_none();
            return Ok(Some(if has_history { KeepReason::Apart } else { KeepReason::Detached }));
        }
        let store = self.records.get().store();
        let is_foreign = is_memory_of_others(storage, |address| store.has_given_out(address))?;
        Ok(is_foreign.then_some(KeepReason::Foreign))
    }

    fn keep(
        &self,
        tensor: &Bound<'_, PyAny>,
        reason: KeepReason,
        nbytes: u64,
        storage_bytes: u64,
    ) -> PyResult<Py<PyAny>> {
        self.session.keep(tensor, reason, nbytes, storage_bytes).map(Bound::unbind)
    }

    /// Packs a tensor whose bytes may leave memory. If the bound has no room, a `Refused` is
    /// packed.
    fn offload<'py>(
        slf: &Bound<'py, Self>,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        layout: Layout,
        start: u64,
        nbytes: u64,
        is_narrow: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let own = slf.get();
        let (py, torch, records) = (tensor.py(), own.torch.get(), own.records.get());
        let (rounds, session) = (own.rounds.get(), &own.session);
        let (writing, prefetching) = (session.writing(py), session.prefetching(py));
        let _hook = Hook::enter();
        // Noted before memory is let go below, because this stream is about to use the tensor.
        let stream = own.stream(py, layout.gpu)?;
        let (sequence, backward) = (torch.sequence_number(py)?, torch.current_backward(py)?);
        let known = records.of(storage)?;
        let part = (layout.offset, start + nbytes);
        let found = Record::find(&known, tensor, storage, part)?;
        if let Some(record) = &found {
            record.get().wait_for_node(sequence);
        }
        // `open_gate` and `reap` come after `wait_for_node`, so that they write no record whose
        // newest node has not been passed; both may wait for the GPU.
        records.open_gate(writing, Some(sequence))?;
        records.reap(writing)?;
        records.renew(&known, tensor, storage, part, writing)?;
        let round = rounds.round_for(py, backward, prefetching)?;
        own.note_waits(&round, stream);
        let is_new = found.is_none();
        let mut awaits_recipe = false;
        let record = if let Some(record) = found {
            record
        } else {
            let key = Rounds::next_key(&round, nbytes, is_narrow);
            own.note_progress(py, stream, key, Use::Pack)?;
            let part = Part { layout: &layout, start, nbytes, sequence, key, stream };
            awaits_recipe = records.is_bounded() && session.planning().rematerializes(py, key)?;
            match own.new_record(tensor, storage, &part, awaits_recipe)? {
                Ok(record) => record,
                Err(refused) => return Ok(refused),
            }
        };
        let saved = SavedTensor::new(tensor, layout, &record, sequence)?;
        rounds.enter(&saved, &round, is_new, is_narrow, stream, prefetching)?;
        let may_be_remade = backward == FORWARD && !is_narrow;
        let is_remade = may_be_remade && Self::has_recipe(slf, &saved, tensor, is_new)?;
        if is_new && !is_remade {
            if awaits_recipe && let Some(refused) = own.make_room(&record, tensor, storage)? {
                return Ok(refused);
            }
            if stream.is_some() {
                own.let_go_for(py, 1)?; // The tensor itself is counted.
            }
            own.write(&record, &round, backward)?;
        }
        own.note_peak(py);
        Ok(saved.into_any())
    }

    /// A record for a tensor, or a `Refused` if the bound has no room for it. A tensor that is
    /// about to get a recipe needs none.
    fn new_record<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        part: &Part<'_>,
        awaits_recipe: bool,
    ) -> PyResult<Result<Bound<'py, Record>, Bound<'py, PyAny>>> {
        let (records, writing) = (self.records.get(), self.session.writing(tensor.py()));
        if !records.is_bounded() || awaits_recipe {
            return records.make(self.torch.get(), tensor, storage, part).map(Ok);
        }
        let may_be_lent = match writing.make_room(tensor, storage, part.nbytes, part.sequence)? {
            Ok(may_be_lent) => may_be_lent,
            Err(refused) => return Ok(Err(refused)),
        };
        let record = records.make(self.torch.get(), tensor, storage, part)?;
        writing.enter(&record, storage, may_be_lent)?;
        Ok(Ok(record))
    }

    /// The stream that is current on a tensor's GPU, if it is on one; that of this hook.
    pub fn stream(&self, py: Python<'_>, gpu: Option<usize>) -> PyResult<Option<GpuStream>> {
        let (Some(gpu), Some(gpus)) = (gpu, self.records.get().gpus()) else { return Ok(None) };
        let stream = gpus.stream(py, gpu)?;
        hook::set_stream(gpu, user_stream(stream));
        Ok(Some(stream))
    }

    /// Has a new record written, unless the plan keeps it and there is no bound; under that of a
    /// GPU it is written if room is short.
    fn write(
        &self,
        record: &Bound<'_, Record>,
        round: &SharedRound,
        backward: i64,
    ) -> PyResult<()> {
        let (py, records) = (record.py(), self.records.get());
        let is_bounded = records.is_bounded();
        let (planning, key) = (self.session.planning(), record.get().key);
        let stays = planning.keeps(py, key)? || planning.rematerializes(py, key)?;
        let is_planned = stays && !is_bounded;
        self.eligible.get().add(record.get().nbytes);
        if is_planned || round.lock().is_skimmed() {
            self.planned.get().add(record.get().nbytes);
            if backward == FORWARD && records.may_spare(record) {
                records.write_if_short(record)?;
            }
            return Ok(());
        }
        // defence: checkpoint recognition
        let is_recomputed = backward != -1 && self.torch.get().is_recompute(py)?;
        if !is_recomputed {
            if record.get().is_on_gpu() && !is_bounded {
                record.get().plan(ByPlan::of(py, planning, key)?);
            }
            let has_way = records.store().has_directory() || planning.pins(py, key)?;
            if !has_way && records.may_spare(record) {
                records.write_if_short(record)?;
            } else {
                records.write_later(record)?; // defence: the gate
            }
        } else if is_bounded {
            records.write_if_short(record)?;
        }
        Ok(())
    }

    /// Notes in a round the waits of a stream's GPU for memory that was let go.
    pub fn note_waits(&self, round: &SharedRound, stream: Option<GpuStream>) {
        if let (Some(stream), Some(gpus)) = (stream, self.records.get().gpus()) {
            let waits = gpus.take_waits(stream.gpu);
            if !waits.is_empty() {
                self.rounds.get().clock.note_waits(round, stream, waits);
            }
        }
    }

    /// Notes the progress of the program on the GPU of a tensor, if it is on one.
    pub fn note_progress(
        &self,
        py: Python<'_>,
        stream: Option<GpuStream>,
        key: i64,
        used: Use,
    ) -> PyResult<()> {
        match (stream, self.records.get().gpus()) {
            (Some(stream), Some(gpus)) => {
                gpus.note_progress(py, self.session.planning(), stream.gpu, key, used)
            }
            _ => Ok(()),
        }
    }

    /// The storage of a saved tensor if its bytes are in memory, else the way to bring them.
    ///
    /// A backward calls this, so the thread has passed all its nodes: their writes begin.
    ///
    /// The room for an early need, by which another tensor is made, was made before.
    fn find<'py>(&self, saved: &Bound<'py, SavedTensor>, is_early: bool) -> PyResult<Found<'py>> {
        let (py, records) = (saved.py(), self.records.get());
        let (rounds, session) = (self.rounds.get(), &self.session);
        let (writing, prefetching) = (session.writing(py), session.prefetching(py));
        // Noted before memory is let go below, because this stream is about to use the tensor.
        let stream = self.stream(py, saved.get().layout.gpu)?;
        self.note_progress(py, stream, saved.get().record.get().key, Use::Need)?;
        if records.is_bounded() && !is_early {
            rounds.early.begin_node(py, saved.get().sequence)?;
        }
        records.open_gate(writing, None)?;
        self.take_back(saved, is_early)?;
        let record = saved.get().record.bind(py);
        let storage = records.in_memory(record, writing)?;
        // defence: bytes that are made on another stream
        let storage = storage.filter(|_| !record.get().is_made_apart(stream));
        records.reap(writing)?;
        if !is_early && record.get().note_own_need() {
            self.note_in_use(saved)?;
        }
        if let Some((round, _)) = saved.get().place() {
            self.note_waits(round, stream);
        }
        if records.account().soft_limit_bytes() < u64::MAX {
            // A graph may be used by several, and be looked at before the first.
            let backward = self.torch.get().current_backward(py)?;
            if self.begun.swap(backward, Ordering::Relaxed) != backward && backward != FORWARD {
                prefetching.begin_backward()?;
            }
        }
        let recipe = saved.get().record.get().used_recipe(py);
        let is_away = storage.is_none() && recipe.is_none();
        if rounds.note_unpack(saved, stream, is_away)? {
            records.cancel_queued(py)?;
        }
        let found = match (storage, recipe) {
            (Some(storage), _) => Found::InMemory(storage),
            (None, Some(recipe)) => Found::Recipe(recipe),
            (None, None) => Found::Read(self.demand(saved, is_early)?),
        };
        rounds.advance(saved, prefetching)?;
        self.note_peak(py);
        Ok(found)
    }

    pub fn note_peak(&self, py: Python<'_>) {
        let records = self.records.get();
        records.account().note_peak(records.transfer_bytes(py));
    }

    /// A tensor on the bytes of a read. `Hooks` waits for a read that has not ended, and raises its
    /// error.
    fn read<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        loading: &Bound<'py, Loading>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = saved.py();
        if !loading.get().is_here() {
            hook::forget();
            self.session.wait_for(saved, loading)?;
        }
        let tensor = loading.get().restore(py, self.torch.get(), &saved.get().layout)?;
        if let Some(loaded) = loading.get().loaded() {
            self.rounds.get().note_load(saved.get(), loaded);
        }
        saved.get().counted(&tensor)
    }
}
