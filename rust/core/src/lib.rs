//! An asynchronous tensor store on NVMe.
//!
//! ```text
//!  any thread                                             one worker per directory
//!  ──────────                                             ────────────────────────
//!  TensorStore::write ──► reserve an Extent ──► SubmitQueue ──► engine ──► kernel ──► SSD
//!       │                     (file)         (lock-free, MPMC)    │
//!       ▼                                                         │ every result checked,
//!     Stored ◄────────────── Ticket ◄─────────────────────────────┘ short I/O resumed
//!       │
//!  TensorStore::read ───► cut a Slot of the Arena ──► the same way ──► Pending ──► Restored
//!             read_into ► the caller's own memory
//! ```
//!
//! Words: a *transfer* moves one tensor, with one *request* for each directory it lies on; a
//! *piece* is the part of a request that one system call moves; an *extent* is a range of the spill
//! file; a *slot* is a range of the arena; a *source* is memory that the kernel reads, a *target*
//! is memory that it writes into.
//!
//! `docs/internals/architecture.md` walks a tensor through the modules, and gives the reasons.

pub mod account;
pub mod allocator;
pub mod config;
pub mod cuda;
pub mod cufile;
pub mod device;
pub mod devices;
pub mod direction;
pub mod disk;
pub mod engine;
pub mod error;
pub mod gate;
pub mod guide;
pub mod masters;
pub mod memory;
pub mod probe;
pub mod queue;
pub mod round;
pub mod rounds;
pub mod staging;
pub mod store;
pub mod stored;
mod sync;
pub mod threads;
pub mod ticket;
pub mod transfer;
pub mod window;
pub use account::{Account, Ended, Fate, Holding, Passed, Reservation, SharedHolding};
pub use config::{Backend, DirectIo, Directory, Faults, PauseSwitch, StoreConfig, Tuning};
pub use devices::Rates;
pub use direction::Direction;
pub use disk::statistics::Traffic;
pub use error::{Error, ErrorKind, Result};
pub use memory::host::{Checksum, HostSource, HostTarget, checksum_of};
pub use store::{Pending, PendingInto, Restored, Stats, TensorStore};
pub use stored::{Overwrite, Stored};
pub use transfer::Transfer;
