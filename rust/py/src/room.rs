//! Room in memory for saved tensors: under the bound of a session, and on a GPU.

use pyo3::prelude::*;
use ssdtrain_core as core;

use crate::offloading::Offloading;
use crate::record::Record;
use crate::saved_tensor::SavedTensor;
use crate::transfer::Loading;

impl Offloading {
    /// Makes room under the bound for a record that has none; the answer is a `Refused` if there
    /// can be none.
    pub fn make_room<'py>(
        &self,
        record: &Bound<'py, Record>,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (this, writing) = (record.get(), self.session.writing(tensor.py()));
        this.holding.free(core::Fate::Kept);
        match writing.make_room(tensor, storage, this.nbytes, this.sequence())? {
            Ok(may_be_lent) => {
                this.holding.take_back();
                writing.enter(record, storage, may_be_lent)?;
                Ok(None)
            }
            Err(refused) => Ok(Some(refused)),
        }
    }

    /// Under a bound, counts a lent record again if the program has let go of its bytes.
    pub fn take_back(&self, saved: &Bound<'_, SavedTensor>, is_early: bool) -> PyResult<()> {
        let (py, record) = (saved.py(), saved.get().record.get());
        if !record.is_lent() || !record.has_source() {
            return Ok(());
        }
        if self.session.writing(py).is_held_by_others(saved.get().record.bind(py))? {
            return Ok(());
        }
        if !is_early {
            self.session.prefetching(py).make_room(saved, record.nbytes)?;
        }
        record.take_back();
        Ok(())
    }

    /// Notes a tensor that is in memory for another tensor, before its own node needs it. Under a
    /// bound it may have to give way.
    pub fn note_early(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        if self.records.get().is_bounded() { self.rounds.get().early.note(saved) } else { Ok(()) }
    }

    /// Notes a tensor that was made again for its own node. Under a bound it may have to give way
    /// once that node has ended, if its graph is retained.
    pub fn note_in_use(&self, saved: &Bound<'_, SavedTensor>) -> PyResult<()> {
        let early = &self.rounds.get().early;
        if self.records.get().is_bounded() { early.note_in_use(saved) } else { Ok(()) }
    }

    /// Lets memory of GPUs go, as far as it can, if its limit leaves no room for so many bytes.
    pub fn let_go_for(&self, py: Python<'_>, nbytes: u64) -> PyResult<()> {
        let records = self.records.get();
        if records.account().soft_room_bytes(records.transfer_bytes(py)) < nbytes {
            self.session.writing(py).let_go_for(nbytes)?;
        }
        Ok(())
    }

    /// The read of a tensor that is needed now. If its GPU has no memory left, all that can leave
    /// it lets go, and the read is tried again.
    pub fn demand<'py>(
        &self,
        saved: &Bound<'py, SavedTensor>,
        is_early: bool,
    ) -> PyResult<Bound<'py, Loading>> {
        let (py, rounds) = (saved.py(), self.rounds.get());
        let prefetching = self.session.prefetching(py);
        match rounds.demand(saved, prefetching, is_early) {
            Err(error) if rounds.is_out_of_memory(py, &error) => {
                self.let_all_go(py)?;
                rounds.demand(saved, prefetching, is_early)
            }
            begun => begun,
        }
    }

    /// Lets go of all memory of GPUs that is held for speed, or until a copy has ended.
    pub fn let_all_go(&self, py: Python<'_>) -> PyResult<()> {
        self.rounds.get().give_way(py);
        self.records.get().end_all(self.session.writing(py))?;
        self.session.writing(py).empty_caches()
    }
}
