//! The tasks that the threads of the program give to the worker, and its wake-up.

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

/// A task that the worker follows.
#[derive(Debug)]
pub enum Task {
    /// A copy from the GPU. Its slot is written to the disk after it has ended.
    Copying(Arc<Parcel>),
    /// A read from the disk. Its slot is copied to the GPU after it has ended.
    Reading(Reading),
    /// A load that had no slot.
    Waiting(Owed, Arc<Stored>),
    /// A copy to the GPU. Its slot is free after it has ended.
    Uploading(Uploading),
}

/// A copy of `len` bytes to the GPU under way.
#[derive(Debug)]
pub struct Uploading {
    pub slot: Arc<PinnedSlot>,
    pub loaded: Arc<Event>,
    pub len: usize,
    /// The bytes for which its time stands, if it is timed.
    pub timed_bytes: u64,
}

/// A read under way.
#[derive(Debug)]
pub struct Reading {
    pub owed: Owed,
    pub slot: Arc<PinnedSlot>,
    pub pending: PendingInto,
}

/// A queue of tasks without a lock. It makes a system call only if the worker sleeps.
#[derive(Debug, Default)]
pub struct Mailbox {
    tasks: SegQueue<Task>,
    is_asleep: AtomicBool,
    is_closed: AtomicBool,
    /// True if the worker has ended.
    is_left: AtomicBool,
    worker: OnceLock<Thread>,
}

impl Mailbox {
    /// Sets the thread that takes the tasks, before any task is posted.
    pub fn belongs_to(&self, worker: &Thread) {
        let is_first = self.worker.set(worker.clone()).is_ok();
        assert!(is_first, "a mailbox has one worker");
    }

    /// Takes a task; `None` if there is none.
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

    /// Refuses new work. The worker ends after nothing is under way.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Returns true if the worker has ended.
    pub fn is_left(&self) -> bool {
        self.is_left.load(Ordering::SeqCst)
    }

    /// Returns true if new work is refused.
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

    /// Returns true if there is no task.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    fn wake(&self) {
        // As in `queue::Waker`: a thread pushes first and then looks for a sleeper; the worker
        // announces its sleep first and then looks at the tasks. The fences make sure that one sees
        // the other.
        fence(Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }

    /// Blocks the worker until there is a task, or the mailbox is closed.
    pub fn sleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.is_empty() && !self.is_closed() {
            thread::park();
        }
        self.is_asleep.store(false, Ordering::SeqCst);
    }
}
