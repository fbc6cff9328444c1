//! cuFile (GPUDirect Storage): transfers between a GPU's memory and a file, without the CPU's.
//!
//! `libcufile` is found at run time, as the CUDA driver is. Where it is missing, lacks a function
//! or refuses, the answer is an error of the kind `Unsupported`, never a panic.
//!
//! `cuFileDriverClose` is never called: in some versions one call closes the library for every
//! user of the process, and `torch.cuda.gds` may be one.

pub mod file;
pub mod library;
pub mod ring;
pub mod trial;
