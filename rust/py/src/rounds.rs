//! Follows the rounds of a session, and begins reads before backward needs them.
//!
//! `activations/prefetch.py` learns from rounds that have ended, and makes room under a bound. The
//! books and the rounds are locked as [Note: no calls] in `writeback.rs` says, the books first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use ssdtrain_core as core;
use ssdtrain_core::cuda::stream::Event;
use ssdtrain_core::guide::Place;
use ssdtrain_core::round::{Entry, FORWARD, Plan, next_key};
use ssdtrain_core::rounds::ORDERS_MAX;

use crate::account::Account;
use crate::ahead::{Early, give_up, saved_of};
use crate::gpu::Gpus;
use crate::gpu_calls::GpuStream;
use crate::gpu_clock::{GpuClock, StorageUse};
use crate::guides::Guides;
use crate::kept::Passed;
use crate::partners::{Prefetching, Scope, Stalls};
use crate::planning::Planning;
use crate::round::{Learned, Round};
use crate::rules::OwnSize;
use crate::saved_tensor::{SavedReference, SavedTensor, SharedRound, is_dead};
use crate::skim::{CountsAs, Skim};
use crate::store::Store;
use crate::timeline::Moment;
use crate::transfer::{Handle, Loading};

/// The rounds of one session.
#[pyclass(frozen, module = "ssdtrain._core")]
pub struct Rounds {
    pub store: Py<Store>,
    pub gpus: Option<Py<Gpus>>,
    pub account: core::Account,
    pub limit_bytes: Option<u64>,
    policy: Planning,
    /// The waits of the session, which are no part of a step's time.
    stalls: Stalls,
    epoch: Instant,
    books: Mutex<Books>,
    /// Under a bound, the tensors that are in memory for others before their own nodes need them.
    pub early: Early,
    /// The skimmed round, if there is one.
    skim: Skim,
    guides: Guides,
    pub clock: GpuClock,
    /// The time that hooks spent on learning from rounds, in nanoseconds.
    taught_ns: AtomicU64,
    /// The time of proofs of recipes, in nanoseconds. They are no part of a step's time.
    proved_ns: AtomicU64,
}

#[derive(Default)]
pub struct Books {
    pub rounds: core::rounds::Rounds<SavedReference>,
    /// The round in whose backward a GPU had no memory left to read ahead.
    pub short: Option<SharedRound>,
    /// By signature, the last plan: the object of Python, and the same in Rust.
    plans: HashMap<i64, (Py<PyAny>, Arc<Plan>)>,
}

#[pymethods]
impl Rounds {
    #[new]
    #[pyo3(signature = (store, gpus, account, *, limit_bytes, policy, stalls))]
    fn new(
        store: Py<Store>,
        gpus: Option<Py<Gpus>>,
        account: &Account,
        limit_bytes: Option<u64>,
        policy: Planning,
        stalls: Stalls,
    ) -> Self {
        Self {
            store,
            gpus,
            account: account.0.clone(),
            limit_bytes,
            policy,
            stalls,
            epoch: Instant::now(),
            books: Mutex::default(),
            early: Early::default(),
            skim: Skim::default(),
            guides: Guides::default(),
            clock: GpuClock::default(),
            taught_ns: AtomicU64::new(0),
            proved_ns: AtomicU64::new(0),
        }
    }

    /// The round that is packed now.
    #[getter]
    fn current(&self) -> Option<Round> {
        self.books().rounds.current().cloned().map(Round)
    }

    /// The rounds that have ended, with the current round if no more of it is needed.
    fn take_ended(&self, py: Python<'_>) -> Vec<Round> {
        let ended = self.books().rounds.take_ended(|saved| is_dead(py, saved));
        ended.into_iter().map(Round).collect()
    }

    /// Seconds since some moment, on a clock that stands still while threads wait for the disk.
    #[getter]
    fn now_s(&self, py: Python<'_>) -> PyResult<f64> {
        let proved = Duration::from_nanos(self.proved_ns.load(Ordering::Relaxed));
        let elapsed = self.epoch.elapsed().saturating_sub(proved);
        Ok(elapsed.as_secs_f64() - self.stalls.total_s(py)?)
    }

    /// True if a GPU has not come to the end of an ended round, so that nothing can be learned yet.
    fn is_awaited(&self, py: Python<'_>, ended: &Round) -> PyResult<bool> {
        self.clock.is_awaited(py, &ended.0)
    }

    /// The times of an ended round that is not awaited.
    fn learned(&self, ended: &Round) -> Learned {
        let items = ended.0.lock().learned_items();
        match self.clock.take(&ended.0, &items) {
            Some(times) => Learned::of_gpu(&times),
            None => Learned::of_hooks(ended, &items),
        }
    }

    /// Makes an ended round, which was followed in whole, the guide of rounds with the same first
    /// tensor.
    fn set_guide(&self, ended: &Round) {
        self.guides.set(&ended.0);
    }

    /// Gives up all reads ahead, and what was made before its own node needs it.
    pub fn give_way(&self, py: Python<'_>) {
        let given_up = self.books().rounds.clear();
        give_up(py, given_up.as_slice());
        self.early.give_up(py);
    }
}

impl Rounds {
    /// The round of a tensor that is packed in `phase`.
    ///
    /// Begins a new round if this pack is the first of it, and has the policy learn from rounds
    /// that have ended.
    pub fn round_for(
        &self,
        py: Python<'_>,
        phase: i64,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<SharedRound> {
        // Under a bound, the tensors that a region of reentrant checkpoints computes again may have
        // to be read, so the region is a round of its own, with an order. Without a bound all
        // regions are one round.
        let may_be_asked_for = phase != FORWARD && self.limit_bytes.is_none();
        let opened = self.books().rounds.open(phase, may_be_asked_for, |saved| is_dead(py, saved));
        if !opened.finished.is_empty() {
            let rounds: Vec<_> = opened.finished.into_iter().map(Round).collect();
            let began = Instant::now();
            prefetching.learn(rounds)?;
            self.count_taught(began);
        }
        Ok(opened.round)
    }

    /// The time in which hooks learned from rounds, proved recipes, or waited for room under a
    /// bound, so far.
    pub fn taught_and_waited(&self, py: Python<'_>) -> PyResult<Duration> {
        let [taught, proved] =
            [&self.taught_ns, &self.proved_ns].map(|ns| ns.load(Ordering::Relaxed));
        Ok(Duration::from_nanos(taught + proved) + self.waited(py)?)
    }

    /// The time in which threads have waited under a bound, so far.
    pub fn waited(&self, py: Python<'_>) -> PyResult<Duration> {
        let waited_s = if self.limit_bytes.is_some() { self.stalls.total_s(py)? } else { 0.0 };
        Ok(Duration::from_secs_f64(waited_s))
    }

    /// Counts the time of a proof of a recipe; a GPU's round with a proof teaches nothing about
    /// times.
    pub fn count_proved(&self, saved: &SavedTensor, took: Duration) {
        self.proved_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        if let Some((round, _)) = saved.place()
            && saved.record.get().is_on_gpu()
        {
            round.lock().set_untimed();
        }
    }

    fn count_taught(&self, began: Instant) {
        self.taught_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// The key that a new record of `nbytes` gets in a round.
    pub fn next_key(round: &SharedRound, nbytes: u64, is_narrow: bool) -> i64 {
        let signature = round.lock().signature();
        next_key(if is_narrow { !signature } else { signature }, nbytes)
    }

    /// True if a tensor that is packed now need not be followed, because its round is skimmed.
    pub fn skims(&self, py: Python<'_>) -> bool {
        self.skim.go_on(py)
    }

    /// Counts a tensor that is not followed; `false` if it has to be followed all the same.
    #[must_use]
    pub fn passes_by(&self, identity: usize) -> bool {
        self.skim.passes_by(identity)
    }

    /// The count of the tensor at this place of an earlier round, if this tensor is like it.
    pub fn known_count(&self, own: OwnSize) -> Option<CountsAs> {
        self.skim.known_count(own)
    }

    /// Notes the count of a tensor that had none at this place.
    pub fn note_count(&self, own: OwnSize, counts: CountsAs) {
        self.skim.note_count(own, counts);
    }

    /// True if the round that began last has a guide.
    pub fn has_guide(&self) -> bool {
        self.guides.is_on()
    }

    /// The round that is packed now, and the place that a tensor of `nbytes` has in its guide;
    /// `None` if the tensor has to be followed.
    pub fn guided(&self, nbytes: u64) -> Option<(SharedRound, Place)> {
        let round = self.books().rounds.current()?.clone();
        let place = round.lock().guided(nbytes)?;
        place.stays.then_some((round, place))
    }

    /// Gives a packed tensor its place in a round.
    pub fn enter(
        &self,
        saved: &Bound<'_, SavedTensor>,
        round: &SharedRound,
        is_new: bool,
        is_narrow: bool,
        stream: Option<GpuStream>,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        let (py, this) = (saved.py(), saved.get());
        let reference = PyWeakrefReference::new(saved)?.unbind(); // defence: lifetime by handle
        let (nbytes, now_s) = (this.record.get().nbytes, self.now_s(py)?);
        let joined = (!is_new).then_some(this.record.get().key);
        let of = Entry { sequence: this.sequence, nbytes, gpu: this.layout.gpu, joined, is_narrow };
        let ordinal = round.lock().add(reference, of, now_s);
        this.take_place(round.clone(), ordinal);
        if ordinal == 0 && round.lock().phase() == FORWARD {
            let began = Instant::now();
            self.begin(saved, round, stream, prefetching)?;
            self.count_taught(began);
        }
        if is_new {
            let (used, name) = (StorageUse::Packed, this.record.get().name());
            self.clock.note(py, round, used, name, stream, None)?;
        }
        Ok(())
    }

    /// Begins a round of a forward with its first tensor, and asks `Prefetcher` for its scope.
    fn begin(
        &self,
        first: &Bound<'_, SavedTensor>,
        round: &SharedRound,
        stream: Option<GpuStream>,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        let py = first.py();
        // If a signal interrupts this, or it fails, the next pack begins a round that asks again.
        round.lock().set_closed(true);
        round.lock().set_plan_count(self.policy.made_count(py)?);
        self.clock.begin(py, round, stream)?;
        if self.limit_bytes.is_none() {
            let opening = round.lock().opening();
            let scope = prefetching.scope(opening)?;
            self.guides.begin(py, round, scope == Scope::Partial, &self.policy)?;
            if scope == Scope::Skimmed {
                self.skim.begin(first, round)?;
            } else if self.guides.is_on() {
                self.skim.count_anew();
            } else {
                self.skim.forget_counts();
            }
        }
        round.lock().set_closed(false);
        Ok(())
    }

    /// Notes the event at which the load of a needed tensor ends on its GPU.
    pub fn note_load(&self, saved: &SavedTensor, loaded: Arc<Event>) {
        if let Some((round, _)) = saved.place() {
            self.clock.note_load(round, saved.record.get().key, loaded);
        }
    }

    /// Notes that a node needs a tensor, which is in memory or `is_away`; `true` if this is the
    /// first need of a round that no plan knows.
    pub fn note_unpack(
        &self,
        saved: &Bound<'_, SavedTensor>,
        stream: Option<GpuStream>,
        is_away: bool,
    ) -> PyResult<bool> {
        let (py, this) = (saved.py(), saved.get());
        let Some((round, ordinal)) = this.place() else { return Ok(false) };
        let (now_s, key) = (self.now_s(py)?, this.record.get().key);
        let loaded = if is_away { this.loaded_ahead() } else { None };
        let is_here = loaded.as_ref().is_some_and(|loaded| loaded.is_known_reached());
        let used = StorageUse::Needed { waits: is_away && !is_here };
        let name = this.record.get().name();
        self.clock.note(py, round, used, name, stream, loaded.as_deref())?;
        let (is_first, is_predicted, is_skimmed) = {
            let round = round.lock();
            (!round.is_asked_for(), round.is_predicted(), round.is_skimmed())
        };
        if is_skimmed {
            self.skim.end_of(round); // defence: a skimmed round ends with its backward
        }
        if is_first || !is_predicted {
            self.predict(py, round)?;
        }
        round.lock().note_needed(*ordinal, key, now_s);
        this.record.get().life.note(Moment::Needed);
        if !is_first {
            return Ok(false);
        }
        Ok(!self.policy.knows(py, key)?)
    }

    /// The read of a tensor that is needed now: the read ahead, or a new read. The room for an
    /// early need was made before.
    pub fn demand<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        prefetching: Prefetching<'_, 'py>,
        is_early: bool,
    ) -> PyResult<Bound<'py, Loading>> {
        let (py, this) = (saved.py(), saved.get());
        if let Some(ahead) = this.set_ahead(None) {
            return Ok(ahead.into_bound(py));
        }
        let handle = this.record.get().handle(py).ok_or_else(|| {
            PyRuntimeError::new_err("a record has its bytes in memory, a handle or a recipe")
        })?;
        if self.limit_bytes.is_some() && !is_early && !handle.get().is_here(py) {
            prefetching.make_room(saved, handle.get().slot_bytes() as u64)?;
        }
        this.record.get().life.note(Moment::ReadBegan);
        Ok(Handle::begin_read(&handle, self.store.get())?.into_bound(py))
    }

    /// Begins the reads that should be under way while `saved` is used.
    pub fn advance(
        &self,
        saved: &Bound<'_, SavedTensor>,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        let py = saved.py();
        let Some((round, ordinal)) = saved.get().place() else { return Ok(()) };
        if self.books().short.as_ref().is_some_and(|short| short.is(round)) {
            return Ok(());
        }
        let Some(given_up) = self.books().rounds.follow(round, *ordinal) else { return Ok(()) };
        self.read_ahead(py, round, &given_up, prefetching)
    }

    /// Begins the reads that are due by the plan, while a tensor is used that is not followed.
    pub fn advance_passed(
        &self,
        py: Python<'_>,
        passed: &Passed,
        prefetching: Prefetching<'_, '_>,
    ) -> PyResult<()> {
        let round = &passed.round;
        if !round.lock().is_predicted() {
            self.predict(py, round)?;
            round.lock().note_passed(passed.key);
        }
        let given_up = self.books().rounds.follow_passed(round);
        given_up.map_or(Ok(()), |given_up| self.read_ahead(py, round, &given_up, prefetching))
    }

    /// True if an error says that torch has no memory of a GPU left.
    pub fn is_out_of_memory(&self, py: Python<'_>, error: &PyErr) -> bool {
        let gpus = self.gpus.as_ref().map(Py::get);
        gpus.is_some_and(|gpus| gpus.calls.is_out_of_memory(py, error))
    }

    fn predict(&self, py: Python<'_>, round: &SharedRound) -> PyResult<()> {
        let signature = round.lock().signature();
        let plan = self.plan(py, signature)?;
        self.books().rounds.predict(round, plan, |reference| {
            let saved = saved_of(py, reference)?;
            let record = saved.get().record.get();
            record.has_handle().then_some(record.key)
        });
        Ok(())
    }

    /// The policy's plan for rounds of this signature.
    fn plan(&self, py: Python<'_>, signature: i64) -> PyResult<Option<Arc<Plan>>> {
        let Some(plan) = self.policy.plan(py, signature)? else { return Ok(None) };
        if let Some((known, used)) = self.books().plans.get(&signature)
            && known.is(&plan)
        {
            return Ok(Some(Arc::clone(used)));
        }
        let used = Arc::new(Planning::readahead_plan(&plan)?);
        let mut books = self.books();
        let is_full = books.plans.len() >= ORDERS_MAX;
        let forgotten = if is_full { std::mem::take(&mut books.plans) } else { HashMap::new() };
        let before = books.plans.insert(signature, (plan.unbind(), Arc::clone(&used)));
        drop(books);
        drop((forgotten, before));
        Ok(Some(used))
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
