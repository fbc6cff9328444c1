//! The memory that I/O touches: our own arena, and what callers lend.

pub mod arena;
pub mod buffer;
