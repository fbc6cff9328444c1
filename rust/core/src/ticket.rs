//! The answer to one operation, which an engine gives once to all threads that wait.
//!
//! The engine holds the [`Completer`], all others hold a [`Ticket`]. A completer that is dropped
//! without an answer answers `Poisoned`: a dead worker must not look like a slow disk.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering};

#[derive(Debug)]
struct Shared {
    /// A forked process inherits the ticket but not the worker that would answer it.
    process: u32,
    /// Set together with `answer`, under its lock. Hooks read it without the lock.
    done: AtomicBool,
    answer: Mutex<Option<Result<()>>>,
    answered: Condvar,
}

/// The waiting side of one operation.
#[derive(Clone, Debug)]
pub struct Ticket(Arc<Shared>);

/// The engine's side. It answers exactly once.
#[derive(Debug)]
pub struct Completer(Option<Arc<Shared>>);

/// A new completer with its ticket.
pub fn ticket() -> (Completer, Ticket) {
    let shared = Arc::new(Shared {
        process: std::process::id(),
        done: AtomicBool::new(false),
        answer: Mutex::new(None),
        answered: Condvar::new(),
    });
    (Completer(Some(Arc::clone(&shared))), Ticket(shared))
}

impl Ticket {
    /// Returns true if the answer is there; never blocks.
    pub fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Acquire)
    }

    /// Returns true if this process was forked from the process whose worker answers.
    pub fn is_forked(&self) -> bool {
        self.0.process != std::process::id()
    }

    /// The answer, if it is there.
    pub fn answer(&self) -> Option<Result<()>> {
        if !self.is_done() {
            return None;
        }
        self.0.answer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits at most `limit` for the answer; `None` if it did not come.
    ///
    /// In a forked process it returns `Closed` at once. The worker does not exist there: a missing
    /// answer never comes, and the lock of an answer may be held for ever.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<()>> {
        if self.is_forked() {
            return Some(Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "this transfer belongs to process {}; a forked process must open its own store",
                    self.0.process
                ),
            )));
        }
        let guard = self.0.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let (guard, _) = self
            .0
            .answered
            .wait_timeout_while(guard, limit, |answer| answer.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        guard.clone()
    }

    /// Waits until the answer is there.
    pub fn wait(&self) -> Result<()> {
        loop {
            if let Some(answer) = self.wait_for(Duration::from_secs(3600)) {
                return answer;
            }
        }
    }
}

impl Completer {
    /// Sets the answer and wakes all threads that wait.
    pub fn complete(mut self, answer: Result<()>) {
        self.send(answer);
    }

    fn send(&mut self, answer: Result<()>) {
        if let Some(shared) = self.0.take() {
            let mut guard = shared.answer.lock().unwrap_or_else(PoisonError::into_inner);
            *guard = Some(answer);
            // Under the lock: a thread that was woken must not find `done` unset.
            shared.done.store(true, Ordering::Release);
            drop(guard);
            shared.answered.notify_all();
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        self.send(Err(Error::new(
            ErrorKind::Poisoned,
            "the I/O worker died before this operation ended; the store cannot be used any more",
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::ticket;
    use crate::error::ErrorKind;
    use std::time::Duration;

    #[test]
    fn an_answer_reaches_every_waiter() {
        let (completer, ticket) = ticket();
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let ticket = ticket.clone();
                std::thread::spawn(move || ticket.wait())
            })
            .collect();
        assert!(ticket.answer().is_none());
        completer.complete(Ok(()));
        for waiter in waiters {
            waiter.join().unwrap().unwrap();
        }
        assert!(ticket.is_done());
    }

    #[test]
    fn a_dropped_completer_is_a_poisoned_answer() {
        let (completer, ticket) = ticket();
        assert!(ticket.wait_for(Duration::from_millis(1)).is_none());
        drop(completer);
        assert_eq!(ticket.wait().unwrap_err().kind(), ErrorKind::Poisoned);
    }
}
