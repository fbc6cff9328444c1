//! A file that is registered with cuFile, and transfers between it and rings.
#![expect(unsafe_code, reason = "calls cuFile")]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::cufile::library::{CODE_MIN, Description, Library, RawHandle, meaning};
use crate::cufile::ring::RingRange;
use crate::direction::Direction;
use crate::error::Result;

/// The registration of a file. Its owner keeps the file open.
#[derive(Debug)]
pub struct Registered {
    library: &'static Library,
    raw: RawHandle,
    process: u32,
}

// SAFETY: cuFile allows that a handle is used from several threads at once.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers a file. It must have a name now, because cuFile opens it again by its name.
    pub fn new(library: &'static Library, file: BorrowedFd<'_>) -> Result<Self> {
        let mut description = Description::of(file.as_raw_fd());
        let mut raw = ptr::null_mut();
        // SAFETY: both outlive the call, which copies the values.
        let answer =
            unsafe { (library.functions.cuFileHandleRegister)(&raw mut raw, &raw mut description) };
        library.check("cuFileHandleRegister", answer)?;
        Ok(Self { library, raw, process: std::process::id() })
    }

    /// Moves `len` bytes between a ring and the file; returns the number moved, which may be
    /// smaller.
    ///
    /// The caller keeps the ring, and nothing else uses the range until this returns.
    pub fn transfer(
        &self,
        direction: Direction,
        address: u64,
        len: usize,
        offset: u64,
    ) -> io::Result<usize> {
        // cuFile would take a stale address for an address of the CPU, so only bytes of a ring are
        // moved.
        let ring = RingRange::around(address, len)
            .ok_or_else(|| io::Error::other("an address that lies in no ring of cuFile"))?;
        let (at, start) = (offset as libc::off_t, (address - ring.address) as libc::off_t);
        let functions = &self.library.functions;
        let moved = ring.gpu.within(|driver| {
            ring.check(driver)?;
            set_errno(0);
            let moved = match direction {
                // SAFETY: the range lies in a ring that is registered, which the caller keeps, and
                // the file is registered as long as this object lives.
                Direction::Write => unsafe {
                    (functions.cuFileWrite)(self.raw, ring.pointer(), len, at, start)
                },
                // SAFETY: as above.
                Direction::Read => unsafe {
                    (functions.cuFileRead)(self.raw, ring.pointer(), len, at, start)
                },
            };
            // Before another call can change errno.
            Ok(if moved >= 0 { Ok(moved as usize) } else { Err(failure(direction, moved)) })
        });
        moved.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // In a forked process the library is the parent's.
        if self.process == std::process::id() {
            // SAFETY: it was registered, its file is open still, and no transfer is under way.
            unsafe { (self.library.functions.cuFileHandleDeregister)(self.raw) }
        }
    }
}

/// The error of a failed transfer: cuFile returns -1 and sets `errno`, or returns the negated code.
fn failure(direction: Direction, answer: isize) -> io::Error {
    let errno = io::Error::last_os_error();
    let code = if answer < -1 {
        c_int::try_from(-answer).unwrap_or(c_int::MAX)
    } else {
        errno.raw_os_error().unwrap_or(0)
    };
    let name = match direction {
        Direction::Write => "cuFileWrite",
        Direction::Read => "cuFileRead",
    };
    match code {
        // The engine handles these codes itself, so they stay the kernel's.
        libc::EINTR | libc::EAGAIN | libc::ENOSPC | libc::EDQUOT => {
            io::Error::from_raw_os_error(code)
        }
        CODE_MIN.. => io::Error::other(format!("{name} failed with {code}: {}", meaning(code))),
        _ => {
            let meaning = io::Error::from_raw_os_error(code);
            io::Error::other(format!("{name} failed: {meaning}"))
        }
    }
}

fn set_errno(value: c_int) {
    // SAFETY: it takes nothing.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the location is this thread's own.
    unsafe { *location = value }
}
