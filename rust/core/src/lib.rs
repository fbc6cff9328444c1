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
//! ```
//!
//! Words: a *request* is one tensor's transfer; a *piece* is the part of it that one system call
//! moves; an *extent* is a range of the spill file; a *slot* is a range of the arena.
//!
//! `docs/architecture.md` says what each module is for and which may use which.

pub mod buffer;
pub mod config;
pub mod device;
pub mod engine;
pub mod error;
pub mod extent;
pub mod file;
pub mod flight;
pub mod meter;
pub mod place;
pub mod probe;
pub mod queue;
pub mod store;
pub mod stripe;
mod sync;
pub mod ticket;

pub use buffer::HostRegion;
pub use config::{Backend, DirectIo, Directory, Faults, StoreConfig, Tuning};
pub use error::{Error, ErrorKind, Result};
pub use flight::Flight;
pub use meter::Traffic;
pub use store::{Pending, Restored, Stats, Stored, TensorStore};
