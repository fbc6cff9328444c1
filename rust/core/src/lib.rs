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
//! Modules may use those to their left: error, config → extent, ticket, meter → buffer, file →
//! queue → engine → store. The unit of truth for this order is `docs/architecture.md`.

pub mod buffer;
pub mod config;
pub mod engine;
pub mod error;
pub mod extent;
pub mod file;
pub mod meter;
pub mod probe;
pub mod queue;
pub mod store;
pub mod ticket;

pub use buffer::HostRegion;
pub use config::{Backend, DirectIo, Directory, Faults, StoreConfig, Tuning};
pub use error::{Error, ErrorKind, Result};
pub use meter::Traffic;
pub use store::{Pending, Restored, Stats, Stored, TensorStore};
