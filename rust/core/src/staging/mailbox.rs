//! What the threads of the program ask the worker to follow, and how they wake it.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};

use crossbeam_queue::SegQueue;

use crate::cuda::stream::Event;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::pinned::PinnedSlot;
use crate::staging::staged::Parcel;
use crate::staging::upload::Owed;
use crate::store::PendingInto;
use crate::stored::Stored;

/// What the worker is asked to follow.
#[derive(Debug)]
pub enum Task {
    /// A copy from the GPU, which is to be written once it has ended.
    Copying(Arc<Parcel>),
    /// A read from the disk, which is to be copied to the GPU.
    Reading(Reading),
    /// A load for which there was no slot.
    Waiting(Owed, Arc<Stored>),
    /// A copy to the GPU, whose slot is free once it has ended.
    Uploading(Uploading),
}

/// A copy to the GPU under way, of so many bytes.
#[derive(Debug)]
pub struct Uploading {
    pub slot: Arc<PinnedSlot>,
    pub loaded: Arc<Event>,
    pub len: usize,
}

/// A read under way.
#[derive(Debug)]
pub struct Reading {
    pub upload: Owed,
    pub slot: Arc<PinnedSlot>,
    pub pending: PendingInto,
}

/// Where tasks are put; without a lock, and with a system call only if the worker sleeps.
#[derive(Debug, Default)]
pub struct Mailbox {
    tasks: SegQueue<Task>,
    is_asleep: AtomicBool,
    is_closed: AtomicBool,
    /// Whether the worker has ended.
    is_left: AtomicBool,
    worker: OnceLock<Thread>,
}

impl Mailbox {
    /// Says which thread takes the tasks, before any is posted.
    pub fn belongs_to(&self, worker: &Thread) {
        let is_first = self.worker.set(worker.clone()).is_ok();
        assert!(is_first, "a mailbox has one worker");
    }

    /// Takes a task, if there is one.
    pub fn take(&self) -> Option<Task> {
        self.tasks.pop()
    }

    /// Says that the worker has ended.
    pub fn leave(&self) {
        self.is_left.store(true, Ordering::SeqCst);
    }

    /// Adds a task.
    pub fn post(&self, task: Task) {
        self.tasks.push(task);
        self.wake();
    }

    /// Refuses new work; the worker ends once nothing is under way.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Whether the worker has ended.
    pub fn is_left(&self) -> bool {
        self.is_left.load(Ordering::SeqCst)
    }

    /// Whether new work is refused.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    pub fn refuse_if_closed(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Closed, "the way to the GPU is closed"));
        }
        if self.is_left() {
            let message =
                "the worker of the copies to and from the GPU has died; open a new session";
            return Err(Error::new(ErrorKind::Poisoned, message));
        }
        Ok(())
    }

    /// Whether there is no task.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    fn wake(&self) {
        // As in `queue::Waker`: whoever posts looks for a sleeper after it pushed, and the worker
        // looks at the tasks after it said that it sleeps; the fences let one see the other.
        fence(Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }

    /// Blocks the worker until there is a task, or no more will come.
    pub fn sleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.is_empty() && !self.is_closed() {
            thread::park();
        }
        self.is_asleep.store(false, Ordering::SeqCst);
    }
}
