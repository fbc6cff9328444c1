//! CUDA as far as staged transfers need it: the driver, one context per GPU, streams and events.
//!
//! Everything is found at run time. Without an NVIDIA driver the answer is an error of the kind
//! `Unsupported`, never a panic.

pub mod driver;
pub mod gpu;
pub mod stream;
