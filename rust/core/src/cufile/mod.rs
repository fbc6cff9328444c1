//! cuFile (GPUDirect Storage): transfers between a GPU's memory and a file, without the CPU's.
//!
//! `libcufile` is looked up at run time, like the CUDA driver. If it is missing, lacks a function
//! or refuses, the answer is an error of the kind `Unsupported`, never a panic.
//!
//! `cuFileDriverClose` is never called: in some versions a call closes the library for every user
//! of the process, and `torch.cuda.gds` may be a user.

pub mod file;
pub mod library;
pub mod ring;
pub mod trial;
