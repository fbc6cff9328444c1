//! Tensors that stay in memory in rounds that are not followed in whole: skimmed rounds (`skim.rs`)
//! and partial rounds (`guides.rs`). They are kept as small tensors are, and counted as if they
//! were followed.

use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core::cuda::hook::Hook;
use ssdtrain_core::round::FORWARD;

use crate::by_plan::Use;
use crate::geometry::Layout;
use crate::kept::{Kept, Passed, is_true};
use crate::offloading::Offloading;
use crate::rules::{OwnSize, Rules, is_managed_at_a_glance};
use crate::skim::{CountedPart, CountsAs};

impl Offloading {
    /// Keeps a tensor of a skimmed round, and counts it as if it were followed; `None` if it has to
    /// be followed.
    pub fn pass_by(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: usize,
        part: CountedPart,
        is_leaf: bool,
    ) -> PyResult<Option<Py<Kept>>> {
        if !self.rounds.get().passes_by(storage) {
            return Ok(None);
        }
        self.keep_passed(tensor, storage, part, is_leaf, None).map(Some)
    }

    /// Holds a tensor that is not followed, and counts its bytes.
    fn keep_passed(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: usize,
        part: CountedPart,
        is_leaf: bool,
        passed: Option<Passed>,
    ) -> PyResult<Py<Kept>> {
        let records = self.records.get();
        let ((identity, most_bytes), nbytes) = (part.shared(storage), part.nbytes);
        let transfer_bytes = records.transfer_bytes(tensor.py());
        let (holding, more_bytes) =
            records.account().hold_passed(identity, nbytes, most_bytes, transfer_bytes);
        if more_bytes > 0 {
            self.eligible.get().add(more_bytes);
            // Tensors that a backward computes again were counted in forward.
            if part.is_forward {
                self.planned.get().add(more_bytes);
            }
        }
        Kept::hold_passed(tensor, is_leaf, holding, passed)
    }

    /// Notes the need of a tensor that is not followed; `true` if reads of its round are due, or
    /// writes may have ended whose memory can be freed.
    pub fn note_passed_need(&self, passed: &Passed) -> bool {
        let records = self.records.get();
        let is_due = {
            let mut round = passed.round.lock();
            round.note_passed(passed.key);
            !round.is_predicted() || round.is_any_due()
        };
        (is_due || records.has_writes()) && !records.is_forked()
    }

    /// Begins the reads that are due while a tensor is needed that is not followed.
    pub fn begin_due(&self, py: Python<'_>, passed: &Passed) -> PyResult<()> {
        let (records, rounds, session) = (self.records.get(), self.rounds.get(), &self.session);
        let (writing, prefetching) = (session.writing(py), session.prefetching(py));
        self.lock.locked(py, || {
            let _hook = Hook::enter();
            // This stream may use memory that is let go below.
            let stream = self.stream(py, passed.gpu)?;
            self.note_progress(py, stream, passed.key, Use::Need)?;
            records.open_gate(writing, None)?;
            records.reap(writing)?;
            self.note_waits(&passed.round, stream);
            rounds.advance_passed(py, passed, prefetching)
        })
    }

    /// Keeps a tensor that stays by the plan of a partial round, and begins and ends the writes of
    /// tensors before it; `None` if it has to be followed.
    fn pass_by_guide(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: usize,
        part: CountedPart,
        is_leaf: bool,
    ) -> PyResult<Option<Py<Kept>>> {
        let (py, torch, records) = (tensor.py(), self.torch.get(), self.records.get());
        if torch.current_backward(py)? != FORWARD || records.is_timed() {
            return Ok(None);
        }
        let Some((round, place)) = self.rounds.get().guided(part.nbytes) else { return Ok(None) };
        let own_gpu = if is_true(tensor, intern!(py, "is_cuda"))? {
            Some(tensor.call_method0(intern!(py, "get_device"))?.extract::<usize>()?)
        } else {
            None
        };
        if own_gpu != place.gpu {
            return Ok(None);
        }
        let _hook = Hook::enter();
        // This stream may use memory that is let go below.
        let stream = self.stream(py, own_gpu)?;
        if records.has_leaving() {
            self.note_progress(py, stream, place.key, Use::Pack)?;
            self.let_leave(py, part.nbytes)?;
            self.note_waits(&round, stream);
        }
        round.lock().pass(part.nbytes);
        let passed = Passed { round, key: place.record_key, gpu: own_gpu };
        self.keep_passed(tensor, storage, part, is_leaf, Some(passed)).map(Some)
    }

    /// Begins writes whose nodes have been passed, and frees the memory of writes that have ended;
    /// also of others, if there is no room for so many bytes.
    fn let_leave(&self, py: Python<'_>, nbytes: u64) -> PyResult<()> {
        let (records, writing) = (self.records.get(), self.session.writing(py));
        let sequence = self.torch.get().sequence_number(py)?;
        self.lock.locked(py, || {
            records.open_gate(writing, Some(sequence))?;
            records.reap(writing)?;
            self.let_go_for(py, nbytes)
        })
    }

    /// Keeps a large tensor of a skimmed or partial round at the least cost, before it is judged;
    /// `None` if it has to be judged.
    pub fn pass_by_at_a_glance(
        &self,
        rules: &Rules,
        tensor: &Bound<'_, PyAny>,
        own: OwnSize,
    ) -> PyResult<Option<Py<Kept>>> {
        let (py, records, rounds) = (tensor.py(), self.records.get(), self.rounds.get());
        if records.is_forked() {
            return Ok(None);
        }
        let is_skimmed = rounds.skims(py);
        if !is_skimmed && !rounds.has_guide() {
            return Ok(None);
        }
        let counts = if let Some(known) = rounds.known_count(own) {
            known
        } else {
            let counts = self.counts_as(rules, tensor)?;
            rounds.note_count(own, counts);
            counts
        };
        match counts {
            CountsAs::Bytes { offset_bytes, part } => {
                let Ok(address) = tensor.call_method0(intern!(py, "data_ptr")) else {
                    return Ok(None);
                };
                let storage = address.extract::<usize>()?.wrapping_sub(offset_bytes);
                if is_skimmed {
                    self.pass_by(tensor, storage, part, own.is_leaf)
                } else {
                    self.pass_by_guide(tensor, storage, part, own.is_leaf)
                }
            }
            CountsAs::Weight => {
                records.account().note_weight();
                Kept::hold(tensor, own.is_leaf, false, None).map(Some)
            }
            CountsAs::Unclear => Ok(None),
        }
    }

    /// The part of its storage with which a tensor that is packed now counts.
    pub fn counted_part(
        &self,
        py: Python<'_>,
        start: u64,
        nbytes: u64,
        storage_bytes: u64,
    ) -> PyResult<CountedPart> {
        let is_forward = self.torch.get().current_backward(py)? == FORWARD;
        Ok(CountedPart { start: start as usize, nbytes, storage_bytes, is_forward })
    }

    /// Finds out how a large tensor is counted in such a round.
    fn counts_as(&self, rules: &Rules, tensor: &Bound<'_, PyAny>) -> PyResult<CountsAs> {
        let py = tensor.py();
        // Tensors without memory of their own (of zeros, of function transforms) raise.
        let Ok(storage) = tensor.call_method0(intern!(py, "untyped_storage")) else {
            return Ok(CountsAs::Unclear);
        };
        let Ok(identity) = storage.call_method0(intern!(py, "data_ptr")) else {
            return Ok(CountsAs::Unclear);
        };
        if !is_managed_at_a_glance(tensor)? {
            return Ok(CountsAs::Unclear);
        }
        if rules.is_weight(tensor)? {
            return Ok(CountsAs::Weight);
        }
        let storage_bytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let (start, nbytes) = Layout::of(tensor)?.part(tensor, storage_bytes)?;
        if self.keep_reason(tensor, &storage, nbytes, storage_bytes)?.is_some() {
            return Ok(CountsAs::Unclear);
        }
        let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let offset_bytes = address.wrapping_sub(identity.extract()?);
        let part = self.counted_part(py, start, nbytes, storage_bytes)?;
        Ok(CountsAs::Bytes { offset_bytes, part })
    }
}
