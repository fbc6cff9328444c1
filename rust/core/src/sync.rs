//! The primitives that threads share: locks, atomics, the queue of requests, and the bell that
//! wakes a sleeping worker.
//!
//! Under `--cfg loom` they are those of a model checker, which runs `tests/rust/loom.rs` through
//! every order of threads and every value that weak memory may show (`make loom`).

#[cfg(not(loom))]
mod real {
    use rustix::event::EventfdFlags;
    use rustix::fd::{AsRawFd, OwnedFd, RawFd};

    use crate::error::{Error, Result};

    pub use crossbeam_queue::ArrayQueue;
    pub use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
    pub use std::sync::{Condvar, Mutex};

    /// A counter of wake-ups, an eventfd. A worker can also wait for it in a ring or a poll.
    #[derive(Debug)]
    pub struct Bell(OwnedFd);

    impl Bell {
        pub fn new() -> Result<Self> {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE;
            let eventfd = rustix::event::eventfd(0, flags).map_err(|errno| {
                Error::from_io("cannot create an eventfd; see `ulimit -n`", &errno.into())
            })?;
            Ok(Self(eventfd))
        }

        pub fn fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }

        /// Blocks until rung and takes one ring.
        pub fn take(&self) -> Result<()> {
            loop {
                match rustix::io::read(&self.0, &mut [0; 8]) {
                    Ok(_) => return Ok(()),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => {
                        return Err(Error::from_io("cannot read an eventfd", &errno.into()));
                    }
                }
            }
        }

        pub fn ring(&self) {
            let written = rustix::io::write(&self.0, &1u64.to_ne_bytes());
            assert!(
                written.is_ok(),
                "an eventfd takes 2^64 wake-ups before it refuses one: {written:?}"
            );
        }
    }
}

#[cfg(loom)]
mod model {
    use std::collections::VecDeque;
    use std::sync::{LockResult, PoisonError};
    use std::time::Duration;

    use loom::sync::MutexGuard;

    use crate::error::Result;

    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

    /// In the model time stands still: a wait ends because its condition changed, or is a deadlock.
    #[derive(Debug)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        pub fn wait_timeout_while<'a, T>(
            &self,
            mut guard: MutexGuard<'a, T>,
            _limit: Duration,
            mut still: impl FnMut(&mut T) -> bool,
        ) -> LockResult<(MutexGuard<'a, T>, ())> {
            while still(&mut guard) {
                guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            Ok((guard, ()))
        }
    }

    /// A counting semaphore, like an eventfd.
    #[derive(Debug)]
    pub struct Bell {
        count: Mutex<u64>,
        rung: loom::sync::Condvar,
    }

    impl Bell {
        pub fn new() -> Result<Self> {
            Ok(Self { count: Mutex::new(0), rung: loom::sync::Condvar::new() })
        }

        pub fn fd(&self) -> std::os::fd::RawFd {
            -1
        }

        pub fn take(&self) -> Result<()> {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.rung.wait(count).unwrap();
            }
            *count -= 1;
            Ok(())
        }

        pub fn ring(&self) {
            *self.count.lock().unwrap() += 1;
            self.rung.notify_one();
        }
    }

    /// `is_empty` takes no lock and orders nothing by itself, as in crossbeam's queue.
    pub struct ArrayQueue<T> {
        items: Mutex<VecDeque<T>>,
        capacity: usize,
        count: AtomicUsize,
    }

    impl<T> ArrayQueue<T> {
        pub fn new(capacity: usize) -> Self {
            let items = Mutex::new(VecDeque::new());
            Self { items, capacity, count: AtomicUsize::new(0) }
        }

        pub fn capacity(&self) -> usize {
            self.capacity
        }

        pub fn push(&self, item: T) -> std::result::Result<(), T> {
            let mut items = self.items.lock().unwrap();
            if items.len() == self.capacity {
                return Err(item);
            }
            items.push_back(item);
            self.count.fetch_add(1, Ordering::Release);
            Ok(())
        }

        pub fn pop(&self) -> Option<T> {
            if self.count.load(Ordering::Acquire) == 0 {
                fence(Ordering::SeqCst);
                if self.count.load(Ordering::Acquire) == 0 {
                    return None;
                }
            }
            let item = self.items.lock().unwrap().pop_front()?;
            self.count.fetch_sub(1, Ordering::Release);
            Some(item)
        }

        pub fn len(&self) -> usize {
            self.count.load(Ordering::Relaxed)
        }

        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }
    }
}

#[cfg(loom)]
pub use model::*;
#[cfg(not(loom))]
pub use real::*;
