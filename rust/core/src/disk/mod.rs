//! One directory on a disk: what is refused there, its file, how it is shared out, what it did,
//! and whether it may be written to.

pub mod checksums;
pub mod directory;
pub mod health;
pub mod spill_file;
pub mod statistics;
pub mod stripe;
