//! The part of CUDA that staged transfers need: the driver, one context per GPU, streams and
//! events.
//!
//! Everything is looked up at run time. Without an NVIDIA driver the answer is an error of the kind
//! `Unsupported`, never a panic.

pub mod driver;
pub mod gpu;
pub mod hook;
pub mod stream;
