//! Streams, the events that order them, and copies.
//!
//! A stream runs its work in order. Only an event orders two streams: it is recorded on one stream,
//! and the other waits for it. The CPU waits for nothing here.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

use crate::cuda::driver::{Driver, code};
use crate::cuda::gpu::Gpu;
use crate::cuda::hook;
use crate::error::Result;
use crate::memory::pinned::PinnedSlot;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream, on which torch computes.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: the event orders and has no time, which is cheaper.
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_DEFAULT`: the event has the time at which it was reached.
const TIMED: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: no call of this thread breaks a graph.
const RELAXED: c_int = 2;

/// A stream of torch. Torch never destroys its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserStream(CUstream);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for UserStream {}
// SAFETY: as above.
unsafe impl Sync for UserStream {}

impl UserStream {
    /// Takes the handle that torch gives.
    ///
    /// # Safety
    /// It is the handle of a stream of the GPU that it is used with, or 0 for the default stream,
    /// and it is never destroyed.
    pub unsafe fn new(handle: usize) -> Self {
        Self(ptr::with_exposed_provenance_mut(handle))
    }
}

/// Memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    address: CUdeviceptr,
    len: usize,
}

impl DeviceRange {
    /// Names `len` bytes at `address`.
    ///
    /// # Safety
    /// The bytes are allocated on the GPU that they are used with. They stay allocated until a
    /// stream on which the allocator reuses them has waited for all work that was begun with them.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        Self { address, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` bytes of it that begin at `start`.
    ///
    /// # Panics
    /// If it is shorter.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "a part outside");
        Self { address: self.address + start as u64, len }
    }
}

/// A stream of `ssdtrain`, for the copies of one direction.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: UserStream,
}

impl Stream {
    /// Makes a stream.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let raw = gpu.within(|driver| {
            let mut stream = ptr::null_mut();
            // SAFETY: the GPU's context is current; `stream` outlives the call.
            let answer =
                unsafe { (driver.functions.cuStreamCreate)(&raw mut stream, NON_BLOCKING) };
            driver.check("cuStreamCreate", answer)?;
            Ok(UserStream(stream))
        })?;
        Ok(Self { gpu: Arc::clone(gpu), raw })
    }

    /// Its handle, for [`Event`].
    pub fn handle(&self) -> UserStream {
        self.raw
    }

    /// Puts a copy from the GPU to a slot on the stream.
    ///
    /// The caller keeps the slot until an event that was recorded afterwards has been reached.
    ///
    /// # Panics
    /// If the slot is shorter.
    pub fn copy_down(&self, source: DeviceRange, slot: &PinnedSlot) -> Result<()> {
        assert!(source.len <= slot.len(), "a copy that is longer than its slot");
        self.gpu.within(|driver| {
            if let Some(on_gpu) = slot.gpu_address() {
                return self.copy_within(driver, on_gpu, source.address, source.len);
            }
            // SAFETY: the slot is pinned, long enough, and kept by the caller until the copy has
            // ended; the maker of the source promised the same of it.
            let answer = unsafe {
                (driver.functions.cuMemcpyDtoHAsync_v2)(
                    slot.address().cast(),
                    source.address,
                    source.len,
                    self.raw.0,
                )
            };
            driver.check("cuMemcpyDtoHAsync_v2", answer)
        })
    }

    /// Puts a copy from a slot to the GPU on the stream; see [`copy_down`](Self::copy_down).
    ///
    /// # Panics
    /// If the slot is shorter.
    pub fn copy_up(&self, slot: &PinnedSlot, target: DeviceRange) -> Result<()> {
        assert!(target.len <= slot.len(), "a copy that is longer than its slot");
        self.gpu.within(|driver| {
            if let Some(on_gpu) = slot.gpu_address() {
                return self.copy_within(driver, target.address, on_gpu, target.len);
            }
            // SAFETY: as in `copy_down`.
            let answer = unsafe {
                (driver.functions.cuMemcpyHtoDAsync_v2)(
                    target.address,
                    slot.address().cast(),
                    target.len,
                    self.raw.0,
                )
            };
            driver.check("cuMemcpyHtoDAsync_v2", answer)
        })
    }

    /// Copies between a slot on the GPU and other memory of the GPU.
    fn copy_within(
        &self,
        driver: &Driver,
        to: CUdeviceptr,
        from: CUdeviceptr,
        len: usize,
    ) -> Result<()> {
        // SAFETY: as in `copy_down`; the slot lies in a ring, which it keeps.
        let answer = unsafe { (driver.functions.cuMemcpyDtoDAsync_v2)(to, from, len, self.raw.0) };
        driver.check("cuMemcpyDtoDAsync_v2", answer)
    }

    /// Blocks the calling thread until the stream has done all its work.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.within(|driver| {
            // SAFETY: the stream is ours and alive.
            let answer = unsafe { (driver.functions.cuStreamSynchronize)(self.raw.0) };
            driver.check("cuStreamSynchronize", answer)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Its work goes on. A driver that ends with the process refuses, and then there is nothing
        // left to free.
        let _gone = self.gpu.within(|driver| {
            // SAFETY: the stream is ours, and nobody uses it any more.
            let answer = unsafe { (driver.functions.cuStreamDestroy_v2)(self.raw.0) };
            driver.check("cuStreamDestroy_v2", answer)
        });
    }
}

/// Returns true if a CUDA graph is being captured from this stream. A [hook](hook::Hook) asks the
/// driver once about its own stream.
pub fn is_capturing(gpu: &Gpu, stream: UserStream) -> Result<bool> {
    if hook::is_uncaptured(gpu, stream) {
        return Ok(false);
    }
    gpu.within(|driver| {
        let mut status = 0;
        // SAFETY: the stream is alive; `status` outlives the call.
        let answer = unsafe { (driver.functions.cuStreamIsCapturing)(stream.0, &raw mut status) };
        driver.check("cuStreamIsCapturing", answer)?;
        if status == 0 {
            hook::note_uncaptured(gpu, stream);
        }
        Ok(status != 0)
    })
}

thread_local! {
    /// True while this thread has told the driver that its calls break no graph.
    static IS_RELAXED: Cell<bool> = const { Cell::new(false) };
}

/// Tells the driver, once for the life of this thread, that its calls break no CUDA graph; for
/// threads of `ssdtrain`. If that fails, each call of `ask` tells it, as in other threads.
pub fn relax_thread(gpu: &Gpu) {
    let relaxed = gpu.within(|driver| exchange_capture_mode(driver, RELAXED));
    IS_RELAXED.set(relaxed.is_ok());
}

/// Runs many questions to the driver with the GPU's context current, and tells it once that they
/// break no CUDA graph.
pub fn ask_all<T>(gpu: &Gpu, questions: impl FnOnce() -> Result<T>) -> Result<T> {
    gpu.within(|driver| ask(driver, questions)?)
}

/// Makes calls that the driver takes for a mistake while a CUDA graph is captured. They would break
/// the graph if the thread had not relaxed the driver's check.
fn ask<T>(driver: &Driver, question: impl FnOnce() -> T) -> Result<T> {
    if IS_RELAXED.get() {
        return Ok(question());
    }
    let before = exchange_capture_mode(driver, RELAXED)?;
    IS_RELAXED.set(true);
    let answer = question();
    IS_RELAXED.set(false);
    exchange_capture_mode(driver, before)?;
    Ok(answer)
}

/// Sets the strictness of the driver's check for this thread during captures; returns the old one.
fn exchange_capture_mode(driver: &Driver, mode: c_int) -> Result<c_int> {
    let mut mode = mode;
    // SAFETY: `mode` outlives the call.
    let answer = unsafe { (driver.functions.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
    driver.check("cuThreadExchangeStreamCaptureMode", answer)?;
    Ok(mode)
}

/// Events of one GPU, reused because making an event costs more than recording it.
#[derive(Debug)]
pub struct EventPool {
    gpu: Arc<Gpu>,
    flags: u32,
    free: Mutex<Vec<RawEvent>>,
}

#[derive(Clone, Copy, Debug)]
struct RawEvent(CUevent);

// SAFETY: an event may be used from any thread.
unsafe impl Send for RawEvent {}

/// A place on a stream.
///
/// A wait on an event is for the place that it marked when the wait was begun. So the event may be
/// dropped and recorded again while a stream still waits.
#[derive(Debug)]
pub struct Event {
    pool: Arc<EventPool>,
    raw: RawEvent,
    /// The earlier place from which its time counts.
    begun: Option<Arc<Event>>,
    /// True if the event was seen reached; it stays reached.
    is_known_reached: AtomicBool,
    /// The last stream that waits for it: the stream's address and 1; 0 if there is none.
    waiting: AtomicUsize,
}

// SAFETY: as for `RawEvent`; no method changes the event but `EventPool::record`, which makes it.
unsafe impl Sync for Event {}

impl EventPool {
    /// An empty pool of events without times.
    pub fn new(gpu: &Arc<Gpu>) -> Arc<Self> {
        Self::with_flags(gpu, DISABLE_TIMING)
    }

    /// An empty pool of events with times.
    pub fn timed(gpu: &Arc<Gpu>) -> Arc<Self> {
        Self::with_flags(gpu, TIMED)
    }

    fn with_flags(gpu: &Arc<Gpu>, flags: u32) -> Arc<Self> {
        Arc::new(Self { gpu: Arc::clone(gpu), flags, free: Mutex::default() })
    }

    /// Marks the end of the work that is on the stream now.
    pub fn record(self: &Arc<Self>, stream: UserStream) -> Result<Arc<Event>> {
        let event = Arc::new(self.record_after(None, stream)?);
        if self.flags == TIMED {
            hook::note_event(&self.gpu, stream, &event);
        }
        Ok(event)
    }

    /// An event that tells the time of the stream now, and orders nothing: the last of this
    /// [hook](hook::Hook) on its own stream, which may be of another pool, or a new event.
    pub fn moment(self: &Arc<Self>, stream: UserStream) -> Result<Arc<Event>> {
        hook::last_event(self.gpu.ordinal(), stream).map_or_else(|| self.record(stream), Ok)
    }

    /// Marks the end of work that began after `begun`, an event with a time.
    pub fn record_after(
        self: &Arc<Self>,
        begun: Option<Arc<Event>>,
        stream: UserStream,
    ) -> Result<Event> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        self.gpu.within(|driver| {
            let raw = free.map_or_else(|| create(driver, self.flags), Ok)?;
            let (is_known_reached, waiting) = (AtomicBool::new(false), AtomicUsize::new(0));
            let pool = Arc::clone(self);
            let event = Event { pool, raw, begun, is_known_reached, waiting };
            // SAFETY: both are alive, and of the GPU whose context is current.
            let answer = unsafe { (driver.functions.cuEventRecord)(event.raw.0, stream.0) };
            driver.check("cuEventRecord", answer)?;
            Ok(event)
        })
    }
}

fn create(driver: &Driver, flags: u32) -> Result<RawEvent> {
    let mut event = ptr::null_mut();
    // SAFETY: a context is current; `event` outlives the call.
    let answer = unsafe { (driver.functions.cuEventCreate)(&raw mut event, flags) };
    driver.check("cuEventCreate", answer)?;
    Ok(RawEvent(event))
}

impl Event {
    /// Returns true if the later work of the stream comes after the event anyway: the event was
    /// seen reached, or the stream waits for it already, and a stream never stops to wait.
    pub fn is_before(&self, stream: UserStream) -> bool {
        self.is_known_reached() || self.waiting.load(Ordering::Acquire) == stream.0.addr() + 1
    }

    /// Makes the later work of the stream wait until the event has been reached, unless it
    /// [comes after it anyway](Self::is_before). The stream must not be captured.
    pub fn wait_on(&self, stream: UserStream) -> Result<()> {
        if self.is_before(stream) {
            return Ok(());
        }
        self.pool.gpu.within(|driver| {
            // SAFETY: both are alive, and of the GPU whose context is current.
            let answer = unsafe { (driver.functions.cuStreamWaitEvent)(stream.0, self.raw.0, 0) };
            driver.check("cuStreamWaitEvent", answer)?;
            self.waiting.store(stream.0.addr() + 1, Ordering::Release);
            Ok(())
        })
    }

    /// Returns true if the event was seen reached; does not ask the driver.
    pub fn is_known_reached(&self) -> bool {
        self.is_known_reached.load(Ordering::Acquire)
    }

    /// Returns true if the event has been reached; an error says that the GPU failed before.
    pub fn is_reached(&self) -> Result<bool> {
        if self.is_known_reached() {
            return Ok(true);
        }
        self.pool.gpu.within(|driver| {
            // SAFETY: the event is alive.
            let answer = ask(driver, || unsafe { (driver.functions.cuEventQuery)(self.raw.0) })?;
            if answer == code::NOT_READY {
                return Ok(false);
            }
            driver.check("cuEventQuery", answer)?;
            // A thread that reads true goes on after all work before the event.
            self.is_known_reached.store(true, Ordering::Release);
            Ok(true)
        })
    }

    /// The time on the GPU from `begun` to this event. Call it after the event has been reached.
    ///
    /// `None` if it has no beginning, or the driver gives no time. That is no failure:
    /// [`is_reached`](Self::is_reached) and the streams report failures of the GPU.
    pub fn took(&self) -> Option<Duration> {
        self.since(self.begun.as_ref()?)
    }

    /// The time from `before` to this event; `None` also if `before` came later.
    pub fn since(&self, before: &Event) -> Option<Duration> {
        Duration::try_from_secs_f64(self.seconds_since(before)?).ok()
    }

    /// The seconds from another event of the same GPU to this event, below 0 if the other came
    /// later. Both have times and have been reached. `None` if the driver gives no time.
    pub fn seconds_since(&self, before: &Event) -> Option<f64> {
        let measured = self.pool.gpu.within(|driver| {
            let mut milliseconds = 0.0;
            let took = &raw mut milliseconds;
            // SAFETY: both events are alive; `milliseconds` outlives the call.
            let answer = ask(driver, || unsafe {
                (driver.functions.cuEventElapsedTime)(took, before.raw.0, self.raw.0)
            })?;
            driver.check("cuEventElapsedTime", answer)?;
            Ok(f64::from(milliseconds))
        });
        Some(measured.ok()? / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever, and the event belongs to the parent.
        if self.pool.gpu.is_forked() {
            return;
        }
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.raw);
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let free = std::mem::take(self.free.get_mut().unwrap_or_else(PoisonError::into_inner));
        // See `Stream::drop`.
        let _gone = self.gpu.within(|driver| {
            for event in free {
                // SAFETY: the event is ours and nobody uses it any more; the driver destroys one
                // that has not been reached once it has been.
                let answer = unsafe { (driver.functions.cuEventDestroy_v2)(event.0) };
                driver.check("cuEventDestroy_v2", answer)?;
            }
            Ok(())
        });
    }
}
