//! One timed pass of requests through `io_uring`, for `ring_features.rs`: the requests, the ring,
//! and what they cost.
#![expect(unsafe_code, reason = "pushes buffer addresses into the submission ring")]

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use io_uring::{CompletionQueue, IoUring, SubmissionQueue, Submitter, opcode, squeue, types};

use crate::ring_memory::{Memory, Pages};

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;
/// A small tensor, and how far apart two of them lie in memory: neither neighbours nor on pages of
/// their own, as an allocator places them.
pub const TENSOR_BYTES: usize = 64 * KIB;
const TENSOR_STRIDE_BYTES: usize = TENSOR_BYTES + 7 * 512;
/// From `io_uring_enter(2)`.
const ENTER_GETEVENTS: u32 = 1;
const ENTER_NO_IOWAIT: u32 = 1 << 7;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Write,
    Read,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    Plain,
    Coop,
    Defer,
    Sqpoll,
    Iopoll,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// For one completion, then take what is there.
    One,
    /// For a quarter of the depth.
    Quarter,
    /// The same, but no longer than this many microseconds if one is there.
    QuarterAtMost(u32),
}

/// A ring, and how it is used.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is one feature that is toggled alone")]
pub struct Rules {
    pub setup: Setup,
    pub wait: Wait,
    pub registered_file: bool,
    pub registered_buffers: bool,
    pub registered_ring: bool,
    pub no_iowait: bool,
    /// Submits in one call and waits in another, so that the first can be timed.
    pub submits_apart: bool,
    pub ring_count: usize,
}

pub const PLAIN: Rules = Rules {
    setup: Setup::Plain,
    wait: Wait::One,
    registered_file: false,
    registered_buffers: false,
    registered_ring: false,
    no_iowait: false,
    submits_apart: false,
    ring_count: 1,
};
/// What the store uses.
pub const DEFER: Rules = Rules { setup: Setup::Defer, ..PLAIN };
pub const DEFER_APART: Rules = Rules { submits_apart: true, ..DEFER };

/// How tensors become requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Memory and file in the same order, a request is a range of both.
    Ranges,
    /// Small tensors that lie apart in memory, one request for each.
    Apart,
    /// As `Apart`, but one vectored request for as many as fill it.
    Vectored,
    /// As `Vectored`, through a copy in memory on huge pages.
    Copied,
}

/// What the file has where a pass writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    Written,
    Allocated,
    AllocatedSecondPass,
    Missing,
    MissingSecondPass,
    WrittenZeroes,
}

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub direction: Direction,
    pub request_bytes: usize,
    pub depth: usize,
    pub rules: Rules,
    pub layout: Layout,
    pub pages: Pages,
    pub blocks: Blocks,
}

/// A range of memory; a number, because it crosses threads.
#[derive(Clone, Copy)]
struct Segment {
    address: usize,
    len: usize,
}

struct Request {
    offset: u64,
    len: usize,
    segments: Vec<Segment>,
}

fn requests(case: &Case, memory: &Memory, pass_bytes: usize) -> Vec<Request> {
    let len = case.request_bytes;
    let tensor_count = pass_bytes / TENSOR_BYTES;
    let segment = |offset: usize, len| {
        assert!(offset + len <= memory.len, "a pass reaches beyond its memory");
        Segment { address: memory.start + offset, len }
    };
    // An odd stride: neighbours in the file are none in memory.
    let tensor = |index: usize| {
        let place = (index * 37 + 5) % tensor_count;
        segment(512 + place * TENSOR_STRIDE_BYTES, TENSOR_BYTES)
    };
    (0..pass_bytes / len)
        .map(|index| {
            let offset = index * len;
            let segments = match case.layout {
                Layout::Ranges => vec![segment(offset, len)],
                _ => (offset..offset + len)
                    .step_by(TENSOR_BYTES)
                    .map(|at| tensor(at / TENSOR_BYTES))
                    .collect(),
            };
            Request { offset: offset as u64, len, segments }
        })
        .collect()
}

/// What one pass cost.
#[derive(Clone, Copy)]
pub struct Outcome {
    pub bytes_per_second: f64,
    pub cpu_seconds_per_gib: f64,
    pub enters_per_gib: f64,
    /// In the call that submits, for each request; only where it is a call of its own.
    pub submit_us: Option<f64>,
    /// Threads that the kernel started because a submission would have waited.
    pub kernel_workers: usize,
    /// To register buffers, or to make the file; before the pass.
    pub prepare_s: f64,
}

#[derive(Default, Clone, Copy)]
struct Tally {
    enters: u64,
    submit: Duration,
    kernel_workers: usize,
    register: Duration,
}

/// The parts of a ring. A registered descriptor is known to this submitter alone, not to the ring.
struct Ends<'a> {
    submitter: Submitter<'a>,
    queue: SubmissionQueue<'a>,
    completions: CompletionQueue<'a>,
}

/// One thread's share of a pass.
struct Worker<'a> {
    case: &'a Case,
    fd: RawFd,
    memory: &'a Memory,
    staging: Segment,
    requests: Vec<&'a Request>,
    depth: usize,
}

impl Worker<'_> {
    fn ring(&self, tally: &mut Tally) -> io::Result<IoUring> {
        let rules = self.case.rules;
        let mut builder = IoUring::builder();
        match rules.setup {
            Setup::Plain => &mut builder,
            Setup::Coop => builder.setup_coop_taskrun(),
            Setup::Defer => builder.setup_single_issuer().setup_defer_taskrun(),
            Setup::Sqpoll => builder.setup_sqpoll(10),
            Setup::Iopoll => builder.setup_iopoll(),
        };
        let ring = builder.build(self.depth as u32)?;
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        if rules.no_iowait && !ring.params().is_feature_no_iowait() {
            return Err(unsupported());
        }
        if matches!(rules.wait, Wait::QuarterAtMost(_)) && !ring.params().is_feature_min_timeout() {
            return Err(unsupported());
        }
        if rules.registered_file {
            ring.submitter().register_files(&[self.fd])?;
        }
        if rules.registered_buffers {
            let begin = Instant::now();
            let all = libc::iovec { iov_base: self.memory.start as _, iov_len: self.memory.len };
            // SAFETY: the memory lives as long as the process.
            unsafe { ring.submitter().register_buffers(&[all]) }?;
            tally.register = begin.elapsed();
        }
        Ok(ring)
    }

    fn entry(&self, request: &Request, vectors: &[libc::iovec], slot: usize) -> squeue::Entry {
        let (offset, len) = (request.offset, request.len as u32);
        let address = match self.case.layout {
            Layout::Copied => self.staging.address + slot * self.case.request_bytes,
            _ => request.segments[0].address,
        } as *mut u8;
        let (iovecs, count) = (vectors.as_ptr(), vectors.len() as u32);
        let fixed = self.case.rules.registered_buffers;
        let vectored = self.case.layout == Layout::Vectored;
        macro_rules! build {
            ($file:expr) => {
                match (self.case.direction, vectored, fixed) {
                    (Direction::Write, true, _) => {
                        opcode::Writev::new($file, iovecs, count).offset(offset).build()
                    }
                    (Direction::Read, true, _) => {
                        opcode::Readv::new($file, iovecs, count).offset(offset).build()
                    }
                    (Direction::Write, _, true) => {
                        opcode::WriteFixed::new($file, address, len, 0).offset(offset).build()
                    }
                    (Direction::Read, _, true) => {
                        opcode::ReadFixed::new($file, address, len, 0).offset(offset).build()
                    }
                    (Direction::Write, ..) => {
                        opcode::Write::new($file, address, len).offset(offset).build()
                    }
                    (Direction::Read, ..) => {
                        opcode::Read::new($file, address, len).offset(offset).build()
                    }
                }
            };
        }
        if self.case.rules.registered_file {
            build!(types::Fixed(0))
        } else {
            build!(types::Fd(self.fd))
        }
    }

    /// Copies between a request's tensors and its place in the staging memory.
    fn copy(&self, request: &Request, slot: usize) {
        let mut place = self.staging.address + slot * self.case.request_bytes;
        for segment in &request.segments {
            let (from, to) = match self.case.direction {
                Direction::Write => (segment.address, place),
                Direction::Read => (place, segment.address),
            };
            // SAFETY: both ranges live as long as the process, were filled, and lie in different
            // mappings; nothing is in flight on this slot.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, segment.len) };
            place += segment.len;
        }
    }

    /// Moves all requests and checks every result; waits for what is in flight even after an error.
    fn run(&self, ring: &mut IoUring, tally: &mut Tally) -> io::Result<()> {
        let (submitter, queue, completions) = ring.split();
        let mut ends = Ends { submitter, queue, completions };
        if self.case.rules.registered_ring {
            ends.submitter.register_ring_fd()?;
        }
        let (copied, write) =
            (self.case.layout == Layout::Copied, self.case.direction == Direction::Write);
        let vectors: Vec<Vec<libc::iovec>> = self.requests.iter().map(|one| vectors(one)).collect();
        let mut vacant: VecDeque<usize> = (0..self.depth).collect();
        let mut holders = vec![0; self.depth];
        let (mut next, mut in_flight, mut failure) = (0, 0, None);
        while in_flight > 0 || (next < self.requests.len() && failure.is_none()) {
            while next < self.requests.len() && failure.is_none() {
                let Some(slot) = vacant.pop_front() else { break };
                let request = self.requests[next];
                if copied && write {
                    self.copy(request, slot);
                }
                let entry = self.entry(request, &vectors[next], slot).user_data(slot as u64);
                // SAFETY: memory lives as long as the process, `vectors` and the file longer than
                // this loop, which ends when nothing is in flight.
                unsafe { ends.queue.push(&entry) }.map_err(io::Error::other)?;
                holders[slot] = next;
                (next, in_flight) = (next + 1, in_flight + 1);
            }
            if self.case.rules.submits_apart {
                let begin = Instant::now();
                self.enter(&mut ends, 0, tally)?;
                tally.submit += begin.elapsed();
            }
            let want = if self.case.rules.wait == Wait::One { 1 } else { (self.depth / 4).max(1) };
            self.enter(&mut ends, want.min(in_flight), tally)?;
            // What the kernel has taken leaves room for the next.
            ends.queue.sync();
            ends.completions.sync();
            for completion in &mut ends.completions {
                let slot = completion.user_data() as usize;
                let request = self.requests[holders[slot]];
                let result = completion.result();
                if result < 0 {
                    failure.get_or_insert(io::Error::from_raw_os_error(-result));
                } else if result as usize != request.len {
                    let what = format!("moved {result} of {} bytes", request.len);
                    failure.get_or_insert(io::Error::other(what));
                } else if copied && !write {
                    self.copy(request, slot);
                }
                vacant.push_back(slot);
                in_flight -= 1;
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn enter(&self, ends: &mut Ends<'_>, want: usize, tally: &mut Tally) -> io::Result<()> {
        tally.enters += 1;
        ends.queue.sync();
        let rules = self.case.rules;
        let entered = match rules.wait {
            _ if rules.no_iowait => {
                let (count, flags) = (ends.queue.len(), ENTER_GETEVENTS | ENTER_NO_IOWAIT);
                // SAFETY: the flags take no argument, and none is given.
                unsafe {
                    ends.submitter.enter::<libc::sigset_t>(count as u32, want as u32, flags, None)
                }
            }
            Wait::QuarterAtMost(us) => {
                let arguments = types::SubmitArgs::new().min_wait_usec(us);
                ends.submitter.submit_with_args(want, &arguments)
            }
            Wait::One | Wait::Quarter => ends.submitter.submit_and_wait(want),
        };
        match entered {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // The loop reaps, and comes again.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME) => Ok(()),
                _ => Err(error),
            },
        }
    }
}

fn vectors(request: &Request) -> Vec<libc::iovec> {
    let vector = |one: &Segment| libc::iovec { iov_base: one.address as _, iov_len: one.len };
    request.segments.iter().map(vector).collect()
}

/// One pass on its own ring or rings; each ring lives on a thread of its own, so that the threads
/// that the kernel starts for it can be told apart.
pub fn pass(
    case: &Case,
    file: &File,
    memory: &Memory,
    staging: &Memory,
    pass_bytes: usize,
) -> io::Result<Outcome> {
    let requests = requests(case, memory, pass_bytes);
    let ring_count = case.rules.ring_count;
    let (ready, done) = (Barrier::new(ring_count + 1), Barrier::new(ring_count + 1));
    let total = Mutex::new(Tally::default());
    let (elapsed, cpu_s) = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for index in 0..ring_count {
            let worker = Worker {
                case,
                fd: file.as_raw_fd(),
                memory,
                staging: Segment { address: staging.start, len: staging.len },
                requests: requests.iter().skip(index).step_by(ring_count).collect(),
                depth: case.depth / ring_count,
            };
            let (ready, done, total) = (&ready, &done, &total);
            threads.push(scope.spawn(move || {
                let mut tally = Tally::default();
                let ring = worker.ring(&mut tally);
                ready.wait();
                let result = ring.and_then(|mut ring| {
                    worker.run(&mut ring, &mut tally)?;
                    Ok(ring)
                });
                done.wait();
                // The ring still lives, and with it the kernel's threads.
                tally.kernel_workers = kernel_workers()?;
                let mut total = total.lock().expect("no thread panics with the lock");
                total.enters += tally.enters;
                total.submit += tally.submit;
                total.kernel_workers += tally.kernel_workers;
                total.register += tally.register;
                result.map(drop)
            }));
        }
        ready.wait();
        let (begin, cpu_begin) = (Instant::now(), process_cpu_s());
        done.wait();
        let measured = (begin.elapsed(), process_cpu_s() - cpu_begin);
        for thread in threads {
            thread.join().expect("a worker returns its errors")?;
        }
        Ok::<_, io::Error>(measured)
    })?;
    if case.rules.setup == Setup::Sqpoll {
        // The kernel ends its thread later, and would charge it to whatever comes next.
        while kernel_threads("iou-sqp-")? > 0 {
            std::thread::yield_now();
        }
    }
    let tally = total.into_inner().expect("no thread panics with the lock");
    let gib = pass_bytes as f64 / f64::from(1 << 30);
    let apart = case.rules.submits_apart;
    Ok(Outcome {
        bytes_per_second: pass_bytes as f64 / elapsed.as_secs_f64(),
        cpu_seconds_per_gib: cpu_s / gib,
        enters_per_gib: tally.enters as f64 / gib,
        submit_us: apart.then(|| tally.submit.as_secs_f64() * 1e6 / requests.len() as f64),
        kernel_workers: tally.kernel_workers,
        prepare_s: tally.register.as_secs_f64(),
    })
}

/// Threads that the kernel started because a submission of this thread would have waited.
fn kernel_workers() -> io::Result<usize> {
    // SAFETY: the call takes nothing and only returns a number.
    kernel_threads(&format!("iou-wrk-{}", unsafe { libc::gettid() }))
}

/// Threads of this process whose names start so.
fn kernel_threads(name: &str) -> io::Result<usize> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread may end while the list is read.
        let comm = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += usize::from(comm.starts_with(name));
    }
    Ok(count)
}

pub fn process_cpu_s() -> f64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure that it is given.
    let answer = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    assert_eq!(answer, 0, "getrusage of the own process cannot fail");
    // SAFETY: zeroes are a valid structure, and the kernel has filled it.
    let usage = unsafe { usage.assume_init() };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
