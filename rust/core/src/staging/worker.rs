//! The thread that follows the copies. It gives filled slots to the store, and copies slots that
//! were read to the GPU.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use crate::cuda::stream::{Event, relax_thread};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::PinnedSlot;
use crate::staging::loading;
use crate::staging::mailbox::{Reading, Task, Uploading};
use crate::staging::shared::{Lane, Shared};
use crate::staging::staged::{Parcel, Place, Tier};
use crate::staging::upload::Owed;
use crate::stored::Stored;

/// Sleep of the worker while something is under way, because an event of the GPU wakes no thread. A
/// copy of 1 MiB takes 20 to 40 microseconds on a bus of 55 and of 25 GB/s.
const POLL: Duration = Duration::from_micros(50);

/// Starts the worker of a staging, and waits until it has the GPU's context, without which it could
/// not see the end of a copy. The worker holds the shared state until it has ended.
pub fn start(shared: &Arc<Shared>) -> Result<()> {
    let worker = Worker {
        shared: Arc::clone(shared),
        copying: VecDeque::new(),
        copied_before: None,
        loaded_before: None,
        writing: Vec::new(),
        waiting: VecDeque::new(),
        reading: Vec::new(),
        uploading: VecDeque::new(),
    };
    let (report, started) = mpsc::channel();
    let named = thread::Builder::new().name(format!("ssdtrain-gpu{}", shared.gpu.ordinal()));
    let began = named.spawn(move || worker.run_on_gpu(&report)).map_err(|error: io::Error| {
        Error::from_io("cannot start the worker of the copies to and from the GPU", &error)
    })?;
    // Nothing was posted before, so no thread has needed the worker's handle.
    shared.mailbox.belongs_to(began.thread());
    started.recv().unwrap_or_else(|_ended| {
        let message = "the worker of the copies to and from the GPU ended as it began";
        Err(Error::new(ErrorKind::Poisoned, message))
    })
}

struct Worker {
    shared: Arc<Shared>,
    /// In the order of the stream: the first copy ends first.
    copying: VecDeque<Arc<Parcel>>,
    /// The ends of the last copies that were counted, from the GPU and to it.
    copied_before: Option<Arc<Event>>,
    loaded_before: Option<Arc<Event>>,
    writing: Vec<Writing>,
    waiting: VecDeque<(Owed, Arc<Stored>)>,
    reading: Vec<Reading>,
    /// In the order of the stream.
    uploading: VecDeque<Uploading>,
}

/// A write under way.
struct Writing {
    parcel: Weak<Parcel>,
    /// Alive until the disk is done with it, even if the parcel was dropped.
    slot: Weak<PinnedSlot>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a panic too: threads that wait must not wait for ever.
        self.waiting.clear();
        self.reading.clear();
        self.shared.mailbox.leave();
        self.shared.take_turn();
    }
}

impl Worker {
    /// Runs with the GPU's context current all the time; reports whether that worked.
    fn run_on_gpu(self, report: &Sender<Result<()>>) {
        let gpu = Arc::clone(&self.shared.gpu);
        let ran = gpu.within(|_| {
            relax_thread(&gpu);
            // The thread that started this thread waits for the message.
            let _received = report.send(Ok(()));
            self.run();
            Ok(())
        });
        if let Err(error) = ran {
            let _received = report.send(Err(error));
        }
    }

    fn run(mut self) {
        loop {
            let mut has_moved = self.take_tasks();
            has_moved |= self.follow_copies();
            has_moved |= self.follow_writes();
            has_moved |= self.begin_waiting();
            has_moved |= self.follow_reads();
            has_moved |= self.follow_uploads();
            if has_moved {
                self.shared.take_turn();
            } else if self.is_idle() {
                if self.shared.mailbox.is_closed() && self.shared.mailbox.is_empty() {
                    return;
                }
                self.shared.mailbox.sleep();
            } else {
                thread::park_timeout(POLL);
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.copying.is_empty()
            && self.writing.is_empty()
            && self.waiting.is_empty()
            && self.reading.is_empty()
            && self.uploading.is_empty()
    }

    fn take_tasks(&mut self) -> bool {
        let mut has_taken = false;
        while let Some(task) = self.shared.mailbox.take() {
            has_taken = true;
            match task {
                Task::Copying(parcel) => self.copying.push_back(parcel),
                Task::Reading(reading) => self.reading.push(reading),
                Task::Waiting(owed, stored) => self.waiting.push_back((owed, stored)),
                Task::Uploading(uploading) => self.uploading.push_back(uploading),
            }
        }
        has_taken
    }

    /// Begins the writes of slots that have been filled.
    fn follow_copies(&mut self) -> bool {
        let mut has_moved = false;
        while let Some(parcel) = self.copying.front().map(Arc::clone) {
            match ended(&parcel.copied, &self.shared.down) {
                Ok(false) => break, // defence: a slot is written after it is filled
                // If the store is busy, this parcel and those behind it wait.
                Ok(true) => {
                    if !self.begin_write(&parcel) {
                        self.look_at_copies();
                        break;
                    }
                    if parcel.group_bytes > 0 {
                        let before = self.copied_before.replace(Arc::clone(&parcel.copied));
                        let bytes = parcel.group_bytes as u64;
                        self.shared.down.count(&parcel.copied, before.as_deref(), bytes, bytes);
                    }
                }
                Err(error) => {
                    // The copy may still run, so the slot is never used again.
                    std::mem::forget(parcel.slot());
                    *parcel.place() = Place::Lost(error);
                }
            }
            self.copying.pop_front();
            self.shared.copying_count.fetch_sub(1, Ordering::Relaxed);
            has_moved = true;
        }
        has_moved
    }

    /// Marks the copies that have ended although the first cannot be written now: their sources
    /// need not wait for the disk.
    fn look_at_copies(&self) {
        // A failure is reported in its turn.
        let is_reached = |parcel: &Arc<Parcel>| matches!(parcel.copied.is_reached(), Ok(true));
        self.copying.iter().all(is_reached);
    }

    /// Gives a slot to the store, or leaves the bytes in it. Returns `false` if the store is busy.
    fn begin_write(&mut self, parcel: &Arc<Parcel>) -> bool {
        if !parcel.is_wanted.load(Ordering::Relaxed) {
            return true;
        }
        let Some(slot) = parcel.slot() else { return true };
        if parcel.tier == Tier::Pinned {
            *parcel.place() = Place::Pinned(slot, None);
            return true;
        }
        match self.shared.store.write(slot.source(parcel.len)) {
            Ok(stored) => {
                let (parcel_under_way, slot_in_use) =
                    (Arc::downgrade(parcel), Arc::downgrade(&slot));
                *parcel.place() = Place::Writing(slot, Arc::new(stored));
                self.writing.push(Writing { parcel: parcel_under_way, slot: slot_in_use });
                self.shared.writing_count.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) if error.kind() == ErrorKind::Busy => return false,
            Err(error) => self.leave_in_slot(parcel, slot, error),
        }
        true
    }

    fn leave_in_slot(&self, parcel: &Parcel, slot: Arc<PinnedSlot>, error: Error) {
        self.shared.note_refusal(&error);
        *parcel.place() = Place::Pinned(slot, Some(error));
    }

    /// Frees the slots whose bytes are on the disk.
    fn follow_writes(&mut self) -> bool {
        let before = self.writing.len();
        let shared = Arc::clone(&self.shared);
        self.writing.retain(|writing| {
            let Some(parcel) = writing.parcel.upgrade() else {
                // The parcel was dropped: a write that has not begun is cancelled, any other ends.
                return writing.slot.strong_count() > 0;
            };
            let (slot, stored) = match &*parcel.place() {
                Place::Writing(slot, stored) => (Arc::clone(slot), Arc::clone(stored)),
                _ => return false,
            };
            match stored.ticket().answer() {
                None => return true,
                Some(Ok(())) => *parcel.place() = Place::OnDisk(stored),
                Some(Err(error)) => {
                    shared.note_refusal(&error);
                    *parcel.place() = Place::Pinned(slot, Some(error));
                }
            }
            false
        });
        let ended_count = before - self.writing.len();
        self.shared.writing_count.fetch_sub(ended_count, Ordering::Relaxed);
        ended_count > 0
    }

    /// Begins loads that had no slot, in their order.
    fn begin_waiting(&mut self) -> bool {
        if self.shared.mailbox.is_closed() {
            let closed = Error::new(ErrorKind::Closed, "the way to the GPU was closed");
            return self.fail_waiting(&closed);
        }
        let mut has_moved = false;
        while let Some((owed, stored)) = self.waiting.pop_front() {
            match loading::read(&self.shared, owed, stored) {
                Some(Task::Waiting(owed, stored)) => {
                    self.waiting.push_front((owed, stored));
                    break;
                }
                Some(begun) => self.shared.mailbox.post(begun),
                None => {}
            }
            has_moved = true;
        }
        let are_slots_under_way = !self.reading.is_empty() || !self.uploading.is_empty();
        if has_moved || are_slots_under_way || self.waiting.is_empty() {
            return has_moved;
        }
        // A GPU that has failed may have lost every slot: then nothing would end this wait.
        let marked = self.shared.events.record(self.shared.up.stream.handle());
        let asked = marked.and_then(|event| event.is_reached());
        asked.is_err_and(|error| self.fail_waiting(&error))
    }

    /// Gives loads that had no slot an error as their answer. Returns false if there are none.
    fn fail_waiting(&mut self, error: &Error) -> bool {
        let has_waiting = !self.waiting.is_empty();
        self.waiting.drain(..).for_each(|(owed, _)| owed.fail(error.clone()));
        has_waiting
    }

    /// Copies slots that have been read to the GPU.
    fn follow_reads(&mut self) -> bool {
        let ended: Vec<_> =
            self.reading.extract_if(.., |reading| reading.pending.ticket().is_done()).collect();
        let has_moved = !ended.is_empty();
        for Reading { owed, slot, pending } in ended {
            if let Some(Err(error)) = pending.ticket().answer() {
                owed.fail(error);
            } else {
                loading::enqueue(&self.shared, owed, slot, None);
            }
        }
        has_moved
    }

    /// Frees the slots whose bytes are on the GPU.
    fn follow_uploads(&mut self) -> bool {
        let mut has_moved = false;
        while let Some(uploading) = self.uploading.front() {
            let is_over = ended(&uploading.loaded, &self.shared.up);
            if let Ok(false) = is_over {
                break; // defence: a slot is free after it is uploaded
            }
            let Uploading { slot, loaded, len, timed_bytes } =
                self.uploading.pop_front().expect("it was there above");
            if is_over.is_ok() {
                let before = self.loaded_before.replace(Arc::clone(&loaded));
                self.shared.up.count(&loaded, before.as_deref(), len as u64, timed_bytes);
            } else {
                // As above. The stream that was lent the target reports the failure to its user.
                std::mem::forget(slot);
            }
            has_moved = true;
        }
        has_moved
    }
}

/// Returns true if a copy has ended. If the driver does not answer, this waits for the whole
/// stream.
fn ended(event: &Event, lane: &Lane) -> Result<bool> {
    event.is_reached().or_else(|_unanswered| lane.stream.synchronize().map(|()| true))
}
