//! The way of saved storages to the disk, from the gate to the free memory.
//!
//! There is one record per saved storage and version, more where parts or counters are apart. If
//! its bytes are saved again after its write began, it is held until the program lets go of them.
//!
//! The gate. An operation may save a tensor before it has filled it (`rrelu` does), so no byte may
//! be read while its node is being made. Autograd numbers nodes per thread; once this thread sees a
//! larger number at a later pack, or runs a backward, the node has been passed and the write may
//! begin.
//!
//! [Note: no calls] Every call here may run a handler of a signal, which may pack tensors itself,
//! and torch may let other threads run. So the books are locked for a look or a change that calls
//! nothing and drops nothing, and after a call all state is looked at again. A thread that waits
//! for a GPU lets all other threads run as well (`session_lock.rs`).
//!
//! `activations/writeback.py` handles failed writes, the bound, and memory of others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use ssdtrain_core as core;

use crate::account::Account;
use crate::books::Books;
use crate::by_plan::ByPlan;
use crate::gate::{Gates, ThreadGate};
use crate::gpu::Gpus;
use crate::held::Held;
use crate::partners::Writing;
use crate::record::{Part, Record};
use crate::saved_tensor::SavedTensor;
use crate::store::Store;
use crate::timeline::{Moment, Timeline};
use crate::torch::Torch;
use crate::transfer::Handle;
use crate::writing::{Writes, upgraded};

/// The records of one session, with their gates and their writes.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Records {
    store: Py<Store>,
    gpus: Option<Py<Gpus>>,
    account: core::Account,
    timeline: Py<Timeline>,
    is_bounded: bool,
    /// The bytes that are given to the disk together.
    pub batch_bytes: u64,
    gates: Gates,
    held: Held,
    is_forked: AtomicBool,
    writes: Writes,
    books: Mutex<Books>,
}

#[pymethods]
impl Records {
    #[new]
    #[pyo3(signature = (
        store, gpus, account, timeline, *, is_bounded, batch_bytes, give_back_bytes, threads,
        count_users
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords on the side of Python")]
    fn new(
        store: Py<Store>,
        gpus: Option<Py<Gpus>>,
        account: &Account,
        timeline: Py<Timeline>,
        is_bounded: bool,
        batch_bytes: u64,
        give_back_bytes: u64,
        threads: Py<PyAny>,
        count_users: Py<PyAny>,
    ) -> Self {
        let (account, books) = (account.0.clone(), Mutex::default());
        let (gates, held) = (Gates::new(threads), Held::new(count_users));
        let is_forked = AtomicBool::new(false);
        let writes = Writes::new(give_back_bytes);
        Self {
            store,
            gpus,
            account,
            timeline,
            is_bounded,
            batch_bytes,
            gates,
            held,
            is_forked,
            writes,
            books,
        }
    }

    fn leave_to_parent(&self) {
        self.is_forked.store(true, Ordering::Relaxed); // defence: a forked child owns nothing
    }

    #[getter]
    pub fn is_forked(&self) -> bool {
        self.is_forked.load(Ordering::Relaxed)
    }

    /// Every record that is alive.
    fn alive(&self, py: Python<'_>) -> PyResult<Vec<Py<Record>>> {
        let known = self.books().all(py);
        let alive = known.iter().filter_map(|reference| upgraded(py, reference).transpose());
        alive.map(|record| record.map(Bound::unbind)).collect()
    }

    /// True if a saved tensor is of this session.
    fn owns(&self, saved: &SavedTensor) -> bool {
        saved.record.get().holding.account().is(&self.account)
    }

    #[getter]
    pub fn is_bounded(&self) -> bool {
        self.is_bounded
    }

    #[pyo3(name = "begin_write")]
    fn begin_planned(
        &self,
        record: &Bound<'_, Record>,
        writing: Writing<'_, '_>,
    ) -> PyResult<bool> {
        self.begin_write(record, writing, None)
    }

    /// Begins the writes of all nodes of this thread, which has passed them.
    fn begin_all(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        self.write_held(writing)?;
        self.open_gate(writing, None)
    }

    pub fn write_later(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        self.gates.own(record.py())?.add(record)
    }

    pub fn write_if_short(&self, record: &Bound<'_, Record>) -> PyResult<()> {
        self.gates.own(record.py())?.add_to_reserve(record)
    }

    /// Begins the writes of this thread's nodes before `sequence`, once there is a batch.
    #[pyo3(name = "open_gate")]
    fn open_own_gate(&self, writing: Writing<'_, '_>, sequence: i64) -> PyResult<()> {
        self.open_gate(writing, Some(sequence))
    }

    fn under_way<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, Handle>>> {
        self.writes.under_way(py)
    }

    #[getter]
    fn writing_count(&self) -> usize {
        self.writes.count()
    }

    /// Cancels the writes that are still in the queue, unless there is a bound.
    ///
    /// Called when a backward begins that no plan knows: it may need a tensor before its write
    /// ends, and on a slow disk its reads need the time of the writes.
    pub fn cancel_queued(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_bounded { Ok(()) } else { self.writes.cancel_queued(py) }
    }

    pub fn end_all(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        self.let_held_go(writing.py());
        self.writes.end_all(writing)
    }

    fn end_oldest(&self, writing: Writing<'_, '_>) -> PyResult<bool> {
        self.writes.end_oldest(writing)
    }

    pub fn has_waiting_gate(&self) -> bool {
        self.gates.has_waiting()
    }

    fn wait_for_transfer(&self, writing: Writing<'_, '_>) -> PyResult<bool> {
        if self.writes.end_oldest(writing)? {
            return Ok(true);
        }
        let py = writing.py();
        if self.store.get().wait_for_abandoned(py, None)? {
            return Ok(true);
        }
        // defence: who needs room waits with who waits for a GPU
        self.gpus().map_or(Ok(false), |gpus| gpus.wait_with_others(py))
    }

    fn wait_for_room(&self, writing: Writing<'_, '_>) -> PyResult<bool> {
        let py = writing.py();
        if writing.wait_for_transfer()? {
            return Ok(true);
        }
        for gate in self.gates.all() {
            if gate.is_of_ended_thread() {
                self.open(py, &gate, None, writing)?;
            }
            self.write_reserve(py, &gate, writing)?;
        }
        writing.wait_for_transfer()
    }
}

impl Records {
    /// Begins the write of a record, or keeps it; `false` if it has to be tried again. `by_plan`
    /// takes the place of the record's own plan.
    pub fn begin_write(
        &self,
        record: &Bound<'_, Record>,
        writing: Writing<'_, '_>,
        by_plan: Option<ByPlan>,
    ) -> PyResult<bool> {
        let (py, this) = (record.py(), record.get());
        let Some(source) = this.source(py) else { return Ok(true) };
        let storage = source.call_method0(intern!(py, "untyped_storage"))?;
        if !this.is_whole(&storage)? || (self.is_bounded && is_lent(record, writing)?) {
            return Ok(true);
        }
        // An earlier call may have begun it, and been interrupted before it was entered below.
        while let Err(error) =
            this.begin_write(self.store.get(), self.gpus(), &source, self.is_bounded, by_plan)?
        {
            match error.kind() {
                // A forked process inherited the hooks but not the disk: it keeps its tensors.
                core::ErrorKind::Closed => return Ok(true),
                core::ErrorKind::Busy if self.is_bounded => {
                    if !writing.wait_for_transfer()? {
                        return Ok(false);
                    }
                }
                core::ErrorKind::Busy => {
                    writing.note_busy(&error)?;
                    if by_plan.is_none() && self.may_spare(record) {
                        self.write_if_short(record)?;
                    }
                    return Ok(true);
                }
                _ => {
                    writing.note_failure(&error)?;
                    return Ok(true);
                }
            }
        }
        this.life.note(Moment::WriteBegan);
        self.writes.add(record)?;
        Ok(true)
    }

    pub fn reap(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        self.let_held_go(writing.py());
        self.writes.reap(writing)
    }

    fn let_held_go(&self, py: Python<'_>) {
        if let Some(gpus) = self.gpus() {
            gpus.let_held_go(py);
        }
    }

    pub fn has_writes(&self) -> bool {
        self.writes.count() > 0
    }

    /// True if the timeline was started.
    pub fn is_timed(&self) -> bool {
        self.timeline.get().is_on()
    }

    pub fn store(&self) -> &Store {
        self.store.get()
    }

    /// The bytes that transfers hold, of the CPU's memory and of GPUs'.
    pub fn transfer_bytes(&self, py: Python<'_>) -> u64 {
        let on_gpus = self.gpus().map_or(0, Gpus::loaded_bytes);
        self.store().transfer_bytes(py) + on_gpus
    }

    /// The GPUs, if torch has some.
    pub fn gpus(&self) -> Option<&Gpus> {
        self.gpus.as_ref().map(Py::get)
    }

    pub fn account(&self) -> &core::Account {
        &self.account
    }

    /// The records of a storage that are alive, the newest first: of parts of it, of versions, and
    /// of counters. Some may be records of an older storage that lay at this address.
    pub fn of<'py>(&self, storage: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, Record>>> {
        let py = storage.py();
        let known = self.books().of(py, identity(storage));
        let alive = known.iter().filter_map(|reference| upgraded(py, reference).transpose());
        alive.collect()
    }

    /// Has the records of bytes that are saved again take them from memory, if their writes have
    /// begun.
    ///
    /// Between the two saves the program may have changed them past the version counter
    /// (`tensor.data[...] = `), and plain autograd has one memory for both. They are written again
    /// once the program has let go of the storage.
    pub fn renew(
        &self,
        known: &[Bound<'_, Record>],
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        part: (u64, u64),
        writing: Writing<'_, '_>,
    ) -> PyResult<()> {
        for record in known {
            let this = record.get();
            if !this.has_handle() || !this.overlaps(part) || !this.is_unchanged_on(storage)? {
                continue;
            }
            record.get().renew(tensor, self.is_bounded)?; // defence: bytes that are saved again
            if self.is_bounded {
                writing.renewed(record)?;
            } else {
                self.held.add(record)?;
            }
        }
        Ok(())
    }

    /// Begins the writes of held records whose bytes the program has let go of.
    ///
    /// Any thread may call this: the operation of a node uses the bytes that it still fills.
    fn write_held(&self, writing: Writing<'_, '_>) -> PyResult<()> {
        let (mut staying, mut outcome) = (Vec::new(), Ok(()));
        for reference in self.held.take() {
            let Some(record) = upgraded(writing.py(), &reference)? else { continue };
            if outcome.is_ok() {
                match self.write_unless_used(&record, writing) {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(error) => outcome = Err(error),
                }
            }
            staying.push(reference);
        }
        self.held.put_back(staying);
        outcome
    }

    fn write_unless_used(
        &self,
        record: &Bound<'_, Record>,
        writing: Writing<'_, '_>,
    ) -> PyResult<bool> {
        let py = record.py();
        let Some(source) = record.get().source(py) else { return Ok(true) };
        let storage = source.call_method0(intern!(py, "untyped_storage"))?;
        let known = self.of(&storage)?;
        Ok(!self.held.is_used(&storage, &known)? && self.begin_write(record, writing, None)?)
    }

    /// Makes a record, which is found by its storage from now on.
    pub fn make<'py>(
        &self,
        torch: &Torch,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        part: &Part<'_>,
    ) -> PyResult<Bound<'py, Record>> {
        let py = tensor.py();
        let record = Record::new(torch, tensor, storage, part, &self.account, self.timeline.get())?;
        let reference = PyWeakrefReference::new(&record)?.unbind();
        // The address identifies a storage only while it lives, which the look-up checks.
        let before = self.books().remember(py, identity(storage), reference);
        drop(before);
        Ok(record)
    }

    /// The storage of a record if its bytes are still in memory; then its write is not needed.
    pub fn in_memory<'py>(
        &self,
        record: &Bound<'py, Record>,
        writing: Writing<'_, 'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, this) = (record.py(), record.get());
        if let Some(source) = this.source(py) {
            let storage = source.call_method0(intern!(py, "untyped_storage"))?;
            if let Some(handle) = this.handle(py) {
                // Under a bound the write goes on: the memory may be needed while this tensor
                // lives.
                if !self.is_bounded && handle.get().cancel(py) {
                    this.set_handle(None);
                } else {
                    this.holding.set_fate(core::Fate::Forwarded);
                    if self.is_bounded {
                        writing.learn_held(record, &storage)?;
                    }
                }
            }
            this.note_found();
            return Ok(Some(storage));
        }
        // defence: live memory before the disk
        let Some(storage) = this.storage(py) else { return Ok(None) };
        if !this.is_whole(&storage)? {
            return Ok(None);
        }
        let was_remade = this.used_recipe(py).is_some();
        let fate = if was_remade { core::Fate::Kept } else { core::Fate::Forwarded };
        this.holding.set_fate(fate);
        if self.is_bounded || !this.was_found() {
            writing.learn_held(record, &storage)?;
        }
        Ok(Some(storage))
    }

    /// Begins the writes of this thread's nodes before `sequence`, once there is a batch.
    ///
    /// Without `sequence`, begins the writes of all nodes, however few.
    pub fn open_gate(&self, writing: Writing<'_, '_>, sequence: Option<i64>) -> PyResult<()> {
        let py = writing.py();
        let Some(gate) = self.gates.here(py)? else { return Ok(()) };
        if gate.gate().has_reserve() {
            let passed = match sequence {
                Some(sequence) => sequence,
                None => writing.sequence_number()?,
            };
            gate.gate().note_passed(passed);
        }
        if gate.gate().may_open(sequence, self.opens_for_bytes(py)) {
            self.open(py, &gate, sequence, writing)?;
        }
        Ok(())
    }

    /// Begins the writes of a gate's records before `sequence`; records that cannot begin now stay.
    fn open(
        &self,
        py: Python<'_>,
        gate: &ThreadGate,
        sequence: Option<i64>,
        writing: Writing<'_, '_>,
    ) -> PyResult<()> {
        self.write_held(writing)?;
        let taken = gate.gate().take();
        let (mut staying, mut is_busy) = (Vec::new(), false);
        let mut outcome = self.begin_copies(py, &taken, sequence);
        for waiting_record in taken {
            let Some(record) = upgraded(py, &waiting_record.item)? else { continue };
            let is_closed = sequence.is_some_and(|passed| record.get().sequence() >= passed);
            if !is_closed && !is_busy && outcome.is_ok() {
                match self.begin_write(&record, writing, None) {
                    Ok(true) => continue,
                    Ok(false) => is_busy = true,
                    // Records that an interrupt left begin the next time.
                    Err(error) => outcome = Err(error),
                }
            }
            staying.push(waiting_record);
        }
        gate.gate().put_back(staying);
        outcome
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a storage's Python object, which identifies the storage while it lives.
fn identity(storage: &Bound<'_, PyAny>) -> usize {
    storage.as_ptr() as usize
}

/// True if the program holds the bytes of a record, so that to write them frees nothing.
fn is_lent(record: &Bound<'_, Record>, writing: Writing<'_, '_>) -> PyResult<bool> {
    if record.get().is_lent() {
        return Ok(true);
    }
    writing.lends(record)
}
