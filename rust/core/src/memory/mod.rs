//! Memory that I/O touches: the arena, sources and targets for the kernel, and pinned memory.

pub mod arena;
pub mod host;
pub mod landing;
pub mod pinned;
