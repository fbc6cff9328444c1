//! A GPU and its primary context, which torch uses too. If the context is not current, it is made
//! current for the time of a call.
#![expect(unsafe_code, reason = "calls the CUDA driver, and maps a page")]

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUcontext;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::cuda::driver::Driver;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::arena::PAGE_BYTES;

/// One GPU of this process.
#[derive(Debug)]
pub struct Gpu {
    driver: &'static Driver,
    ordinal: usize,
    context: Context,
    owner: OwnerProcess,
}

/// The process that made a [`Gpu`].
///
/// Every call of the driver checks for a forked child, and asking the kernel for the number of the
/// process takes longer than some of those calls.
#[derive(Debug)]
struct OwnerProcess {
    process: u32,
    /// True here. The kernel wipes it in every forked child. Without it the number of the process
    /// tells.
    is_owner: Option<&'static AtomicBool>,
}

impl OwnerProcess {
    fn current() -> Self {
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE_BYTES, flags.0, flags.1) };
        let is_owner = mapped.ok().and_then(|page| {
            // SAFETY: the page was just mapped, and nobody else knows it.
            let wiped = unsafe { rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) };
            // An older kernel cannot wipe it; the page is then lost, once per GPU.
            wiped.ok()?;
            // SAFETY: the page holds zeros, which is a bool, and it is never unmapped.
            Some(unsafe { &*page.cast::<AtomicBool>() })
        });
        if let Some(is_owner) = is_owner {
            is_owner.store(true, Ordering::Relaxed);
        }
        Self { process: std::process::id(), is_owner }
    }

    fn is_forked(&self) -> bool {
        match self.is_owner {
            Some(is_owner) => !is_owner.load(Ordering::Relaxed),
            None => self.process != std::process::id(),
        }
    }
}

thread_local! {
    /// The context that is current in this thread inside of [`Gpu::within`]; 0 outside of it.
    static WITHIN: Cell<usize> = const { Cell::new(0) };
    /// The error of a context that could not be made current again.
    static UNREPORTED: Cell<Option<Error>> = const { Cell::new(None) };
}

/// Restores the noted context when it is dropped.
struct Entered(usize);

impl Drop for Entered {
    fn drop(&mut self) {
        WITHIN.set(self.0);
    }
}

#[derive(Debug)]
struct Context(CUcontext);

// SAFETY: a context may be made current on any thread, and on several at once; it is never
// released.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// The GPU with this number, as torch counts them.
    ///
    /// Its primary context is retained once per process and never released: torch owns it, and may
    /// still use it while the interpreter ends.
    pub fn get(ordinal: usize) -> Result<Arc<Self>> {
        static KNOWN: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = known.iter().find(|gpu| gpu.ordinal == ordinal) {
            gpu.refuse_if_forked()?;
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Self::retain(ordinal)?);
        known.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    fn retain(ordinal: usize) -> Result<Self> {
        let driver = Driver::get()?;
        let number = c_int::try_from(ordinal).map_err(|_too_large| {
            Error::new(ErrorKind::Config, format!("there is no GPU with the number {ordinal}"))
        })?;
        let mut device = 0;
        // SAFETY: `device` outlives the call.
        let answer = unsafe { (driver.functions.cuDeviceGet)(&raw mut device, number) };
        driver.check("cuDeviceGet", answer)?;
        let mut context = ptr::null_mut();
        // SAFETY: the device was just found; `context` outlives the call.
        let answer =
            unsafe { (driver.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", answer)?;
        Ok(Self { driver, ordinal, context: Context(context), owner: OwnerProcess::current() })
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Calls `run` with this GPU's context current; afterwards the caller's is current again.
    ///
    /// The context is mostly current before, because torch leaves it so in each thread that
    /// computes on the GPU. Asking is one call; entering and leaving are two. Calls inside of `run`
    /// do not even ask. If only the way back to the caller's context fails, the result of `run`
    /// must not be lost: the next call in this thread returns that error.
    pub fn within<T>(&self, run: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        let driver = self.driver;
        let own = self.context.0.addr();
        // No thread forks in here, so this process is no forked child.
        if WITHIN.get() == own {
            return run(driver);
        }
        self.refuse_if_forked()?;
        if let Some(error) = UNREPORTED.take() {
            return Err(error);
        }
        let is_current = self.is_current()?;
        let _entered = Entered(WITHIN.replace(own));
        if is_current {
            return run(driver);
        }
        // SAFETY: the context was retained and is never released.
        let answer = unsafe { (driver.functions.cuCtxPushCurrent_v2)(self.context.0) };
        driver.check("cuCtxPushCurrent_v2", answer)?;
        let ran = run(driver);
        let mut popped = ptr::null_mut();
        // SAFETY: pops the context that was pushed above; `popped` outlives the call.
        let answer = unsafe { (driver.functions.cuCtxPopCurrent_v2)(&raw mut popped) };
        UNREPORTED.set(driver.check("cuCtxPopCurrent_v2", answer).err());
        ran
    }

    /// Returns true if its context is current in this thread.
    fn is_current(&self) -> Result<bool> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` outlives the call.
        let answer = unsafe { (self.driver.functions.cuCtxGetCurrent)(&raw mut current) };
        self.driver.check("cuCtxGetCurrent", answer)?;
        Ok(current == self.context.0)
    }

    /// Returns true if this process was forked from the process that retained the context. CUDA
    /// forbids its use in a child.
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    fn refuse_if_forked(&self) -> Result<()> {
        if self.is_forked() {
            let message = "a forked process cannot use the GPU of its parent; start it with the \
                           start method \"spawn\"";
            return Err(Error::new(ErrorKind::Closed, message));
        }
        Ok(())
    }
}
