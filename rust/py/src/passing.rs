//! Tensors that stay in memory, of rounds that are not followed in whole: skimmed ones (`skim.rs`),
//! and those of which only what leaves is followed (`guides.rs`). They are kept as small ones are,
//! and counted as if they were followed.

use pyo3::intern;
use pyo3::prelude::*;
use ssdtrain_core::round::FORWARD;

use crate::by_plan::Use;
use crate::geometry::Layout;
use crate::kept::Kept;
use crate::offloading::Offloading;
use crate::record::Record;
use crate::rules::{OwnSize, Rules, is_managed_at_a_glance};
use crate::skim::{CountedPart, CountsAs};

impl Offloading {
    /// Keeps a tensor of a round that is only skimmed, and counts it as if it were followed; `None`
    /// if it is to be followed.
    pub fn pass_by(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: usize,
        part: CountedPart,
        is_leaf: bool,
    ) -> PyResult<Option<Py<Kept>>> {
        let records = self.records.get();
        let (identity, most_bytes) = part.shared(storage);
        let more_bytes = records.account().shared_more_bytes(identity, part.nbytes, most_bytes);
        if !self.rounds.get().passes_by(storage) {
            return Ok(None);
        }
        if more_bytes > 0 {
            self.eligible.get().add(more_bytes);
            // What a backward computes again was counted in forward.
            if part.is_forward {
                self.planned.get().add(more_bytes);
            }
        }
        self.keep_passed(tensor, is_leaf, (identity, part.nbytes, most_bytes)).map(Some)
    }

    /// Holds a tensor that is not followed, and counts its bytes of a storage, which has so many at
    /// most.
    fn keep_passed(
        &self,
        tensor: &Bound<'_, PyAny>,
        is_leaf: bool,
        (identity, nbytes, most_bytes): (usize, u64, u64),
    ) -> PyResult<Py<Kept>> {
        let records = self.records.get();
        let holding = records.account().hold_shared(identity, nbytes, most_bytes);
        records.account().note_peak(records.transfer_bytes(tensor.py()));
        Kept::hold(tensor, is_leaf, false, Some(holding))
    }

    /// Keeps a tensor that stays by plan in a round of which only what leaves is followed, and sees
    /// to what has left before it; `None` if it is to be followed.
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
        let own_gpu = tensor.call_method0(intern!(py, "get_device"))?.extract::<i64>()?;
        let own_gpu = usize::try_from(own_gpu).ok();
        let stays = if place.is_new {
            own_gpu == place.gpu && self.session.planning().keeps(py, place.key)?
        } else {
            // It may share the bytes of one that leaves.
            !self.has_record(tensor)?
        };
        if !stays {
            return Ok(None);
        }
        let stream = match (own_gpu, records.gpus()) {
            // It may use what is let go.
            (Some(gpu), Some(gpus)) => Some(gpus.stream(py, gpu)?),
            _ => None,
        };
        if records.has_leaving() {
            self.note_progress(py, stream, place.key, Use::Pack)?;
            self.let_leave(py)?;
            self.note_waits(&round, stream);
        }
        round.lock().pass(part.nbytes);
        let (identity, most_bytes) = part.shared(storage);
        let more_bytes = records.account().shared_more_bytes(identity, part.nbytes, most_bytes);
        self.eligible.get().add(more_bytes);
        self.planned.get().add(more_bytes);
        self.keep_passed(tensor, is_leaf, (identity, part.nbytes, most_bytes)).map(Some)
    }

    /// Whether what is known of the tensor's storage has its bytes at its version.
    fn has_record(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?;
        let storage_bytes: u64 = storage.call_method0(intern!(tensor.py(), "nbytes"))?.extract()?;
        let layout = Layout::of(tensor)?;
        let (start, nbytes) = layout.part(tensor, storage_bytes)?;
        let known = self.records.get().of(&storage)?;
        let part = (layout.offset, start + nbytes);
        Ok(Record::find(&known, tensor, &storage, part)?.is_some())
    }

    /// Begins the writes that have waited for their nodes, and frees what has left.
    fn let_leave(&self, py: Python<'_>) -> PyResult<()> {
        let (records, writing) = (self.records.get(), self.session.writing(py));
        let sequence = self.torch.get().sequence_number(py)?;
        self.lock.locked(py, || {
            records.open_gate(writing, Some(sequence))?;
            records.reap(writing)
        })
    }

    /// Does either for a large tensor that nobody has judged, at the least cost. `None`: it has to
    /// be judged.
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

    /// What a tensor counts with that is packed now.
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

    /// Looks at a large tensor as closely as counting it needs.
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
