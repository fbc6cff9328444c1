//! One directory on a disk: what is refused there, its file, how it is shared out, what it did.

pub mod directory;
pub mod spill_file;
pub mod statistics;
pub mod stripe;
