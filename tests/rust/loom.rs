//! Ticket, waker and queue in every order of threads, by a model checker: `make loom`.
#![cfg(loom)]

use std::any::Any;
use std::sync::{Arc, OnceLock};

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use ssdtrain_core::direction::Direction;
use ssdtrain_core::disk::spill_file::{Extent, Quota, SpillFile};
use ssdtrain_core::memory::arena::{Arena, Slot};
use ssdtrain_core::memory::landing::Landing;
use ssdtrain_core::queue::{Job, JobMemory, Request, SubmitQueue};
use ssdtrain_core::ticket::{Ticket, ticket};
use ssdtrain_core::{DirectIo, Error, ErrorKind, Result};

#[expect(dead_code, reason = "what the models do not lend, other tests do")]
mod memory;
use memory::{Memory, lend_with};

/// Preemptions in one execution: more find nothing that these do not, as the literature has it.
const PREEMPTIONS_MAX: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(model);
}

/// A range of a file; the model moves no bytes.
fn extent() -> Arc<Extent> {
    static EXTENT: OnceLock<Arc<Extent>> = OnceLock::new();
    Arc::clone(EXTENT.get_or_init(|| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (file, _) = SpillFile::open(dir.path(), DirectIo::Optional, &Quota::new(None)).unwrap();
        Arc::new(file.reserve(4096).unwrap())
    }))
}

/// Memory to read into; the model moves no bytes.
fn slot() -> Arc<Slot> {
    static SLOT: OnceLock<Arc<Slot>> = OnceLock::new();
    Arc::clone(SLOT.get_or_init(|| Arc::new(Arena::new(0).unwrap().slot(512).unwrap())))
}

/// A write whose source has `owner`.
fn owned_request(owner: impl Any + Send) -> (Request, Ticket) {
    let source = lend_with(&Memory::new(1, 512, 0), 0, owner);
    let (completer, ticket) = ticket();
    (Request::new(Job::new(extent(), JobMemory::From(source), completer)), ticket)
}

fn request(direction: Direction) -> (Request, Ticket) {
    if direction == Direction::Write {
        return owned_request(());
    }
    let (completer, ticket) = ticket();
    let memory = JobMemory::Into(Landing::from(slot()));
    (Request::new(Job::new(extent(), memory, completer)), ticket)
}

/// Says when it is dropped, in a way that the model checker sees.
struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn kind(answer: Option<Result<()>>) -> Option<ErrorKind> {
    answer.expect("a ticket without an answer").err().map(|error| error.kind())
}

/// Ends a request as a worker does.
fn serve(request: &Request) -> bool {
    let Some(job) = request.claim() else { return false };
    let is_cancel_asked = request.is_cancel_asked();
    let cancelled = || Err(Error::new(ErrorKind::Cancelled, "cancelled on its way"));
    job.finish(if is_cancel_asked { cancelled() } else { Ok(()) });
    true
}

/// The loop of `engine/psync.rs`, for `count` requests or until the queue is closed.
fn work(queue: &SubmitQueue, count: usize) {
    let mut served = 0;
    while served < count && !queue.is_closed() {
        match queue.pop(Direction::Read).or_else(|| queue.pop(Direction::Write)) {
            Some(request) => served += usize::from(serve(&request)),
            None if queue.may_sleep(true) => queue.waker().consume().unwrap(),
            None => thread::yield_now(),
        }
    }
}

#[test]
fn every_waiter_sees_the_answer_and_sees_it_again() {
    check(|| {
        let (completer, ticket) = ticket();
        let other = ticket.clone();
        let waiter = thread::spawn(move || {
            other.wait().unwrap();
            // Who has waited may ask again, without waiting.
            assert!(other.is_done());
            assert_eq!(kind(other.answer()), None);
        });
        let worker = thread::spawn(move || completer.complete(Ok(())));
        ticket.wait().unwrap();
        assert!(ticket.is_done());
        assert_eq!(kind(ticket.answer()), None);
        waiter.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn a_dead_worker_answers() {
    check(|| {
        let (completer, ticket) = ticket();
        let worker = thread::spawn(move || drop(completer));
        assert_eq!(kind(Some(ticket.wait())), Some(ErrorKind::Poisoned));
        worker.join().unwrap();
    });
}

#[test]
fn a_done_request_has_given_its_memory_back() {
    check(|| {
        let freed = Arc::new(AtomicBool::new(false));
        let (request, ticket) = owned_request(Owner(Arc::clone(&freed)));
        let worker = thread::spawn(move || serve(&request));
        if ticket.is_done() {
            assert!(freed.load(Ordering::Relaxed));
        }
        worker.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost() {
    check(|| {
        let queue = SubmitQueue::new(2).unwrap();
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || work(&queue, 2))
        };
        let (first, first_ticket) = request(Direction::Read);
        let producer = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.push(&first).unwrap())
        };
        let (second, second_ticket) = request(Direction::Write);
        queue.push(&second).unwrap();
        for ticket in [first_ticket, second_ticket] {
            ticket.wait().unwrap();
        }
        worker.join().unwrap();
        producer.join().unwrap();
    });
}

/// A worker that waits for other things too may wake without the bell, which then rings later.
#[test]
fn waking_for_another_reason_loses_nothing() {
    check(|| {
        let queue = SubmitQueue::new(2).unwrap();
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                if queue.may_sleep(true) {
                    queue.woke();
                }
                let mut served = 0;
                while served < 2 {
                    match queue.pop(Direction::Read) {
                        Some(request) => served += usize::from(serve(&request)),
                        None if queue.may_sleep(true) => {
                            queue.waker().consume().unwrap();
                            queue.woke();
                        }
                        None => thread::yield_now(),
                    }
                }
            })
        };
        let tickets = [(), ()].map(|()| {
            let (request, ticket) = request(Direction::Read);
            queue.push(&request).unwrap();
            ticket
        });
        for ticket in tickets {
            ticket.wait().unwrap();
        }
        worker.join().unwrap();
    });
}

#[test]
fn two_workers_wake_for_two_requests_and_for_the_close() {
    check(|| {
        let queue = SubmitQueue::new(2).unwrap();
        let workers = [(), ()].map(|()| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || work(&queue, usize::MAX))
        });
        let (request, ticket) = request(Direction::Read);
        queue.push(&request).unwrap();
        ticket.wait().unwrap();
        queue.close(2);
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn a_job_is_taken_exactly_once() {
    check(|| {
        let (request, ticket) = request(Direction::Write);
        let taken = Arc::new(AtomicUsize::new(0));
        let worker = {
            let (request, taken) = (request.clone(), Arc::clone(&taken));
            thread::spawn(move || {
                taken.fetch_add(usize::from(serve(&request)), Ordering::SeqCst);
            })
        };
        let cancelled = request.cancel();
        worker.join().unwrap();
        let served = taken.load(Ordering::SeqCst);
        assert_eq!(served + usize::from(cancelled), 1);
        // Whoever came first, the answer is there; a cancellation that freed the job says so.
        let answer = kind(ticket.answer());
        assert!(answer == Some(ErrorKind::Cancelled) || !cancelled);
    });
}

/// A request that meets a close is refused, served or answered with `Closed`, whoever is first.
#[test]
fn a_push_that_meets_a_close_is_answered() {
    check(|| {
        let queue = SubmitQueue::new(2).unwrap();
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || work(&queue, usize::MAX))
        };
        let (request, ticket) = request(Direction::Write);
        let producer = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.push(&request).map_err(|error| error.kind()))
        };
        queue.close(1);
        worker.join().unwrap();
        queue.cancel_all();
        match producer.join().unwrap() {
            Ok(()) => {
                let answer = kind(ticket.answer());
                assert!(matches!(answer, None | Some(ErrorKind::Closed)), "{answer:?}");
            }
            Err(refusal) => assert_eq!(refusal, ErrorKind::Closed),
        }
    });
}
