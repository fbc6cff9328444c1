//! The owners of the bytes of writes: workers give them back, and a thread with the GIL drops them.
//!
//! `PyO3` would defer the decrement as well, but behind a lock: a process that is forked while a
//! worker holds it could never enter this module again. Here a worker gives an owner back by one
//! exchange of a pointer, which a forked process finds either done or not begun.
#![expect(unsafe_code, reason = "a lock-free list of raw pointers")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::prelude::*;

/// The owners that were given back, the last one first.
static GIVEN_BACK: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

struct Node {
    object: Py<PyAny>,
    next: AtomicPtr<Node>,
}

/// A Python object that may be dropped on any thread.
pub struct Owner(*mut Node);

// SAFETY: the node belongs to this owner alone until it is dropped, and the object in it is touched
// only by threads with the GIL.
unsafe impl Send for Owner {}

impl Owner {
    /// Allocates the node of the list here, so that a worker allocates nothing.
    pub fn new(object: Py<PyAny>) -> Self {
        let next = AtomicPtr::new(ptr::null_mut());
        Self(Box::into_raw(Box::new(Node { object, next })))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the node came from a box in `new`, and nobody else has it before the exchange.
        let node = unsafe { &*self.0 };
        let mut head = GIVEN_BACK.load(Ordering::Relaxed);
        loop {
            node.next.store(head, Ordering::Relaxed);
            // The thread that takes the list sees the node as it was written here.
            let exchanged = GIVEN_BACK.compare_exchange_weak(
                head,
                self.0,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// Drops the owners that were given back until now; `true` if there were some.
pub fn let_go(py: Python<'_>) -> bool {
    if GIVEN_BACK.load(Ordering::Relaxed).is_null() {
        return false;
    }
    // The list is taken as a whole first, because a drop may run code that comes here again.
    let mut next = GIVEN_BACK.swap(ptr::null_mut(), Ordering::Acquire);
    while !next.is_null() {
        // SAFETY: the exchange above made this thread the only one that knows these nodes, each of
        // which came from a box in `new`.
        let node = unsafe { Box::from_raw(next) };
        next = node.next.load(Ordering::Relaxed);
        node.object.drop_ref(py);
    }
    true
}

/// As the last field of an object, it drops the owners that the fields before it gave back.
pub struct LetGo;

impl Drop for LetGo {
    fn drop(&mut self) {
        // Without an interpreter there is nothing to drop any more.
        let _ended = Python::try_attach(let_go);
    }
}
