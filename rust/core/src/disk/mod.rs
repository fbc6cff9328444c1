//! One directory on a disk: its checks, its file, the division among devices, its traffic and its
//! health.

pub mod checksums;
pub mod directory;
pub mod health;
pub mod spill_file;
pub mod statistics;
pub mod stripe;
