//! Memory that I/O touches: the arena, and what the kernel may read from or write into.

pub mod arena;
pub mod host;
pub mod landing;
pub mod pinned;
