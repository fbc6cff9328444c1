//! `try_cufile`: whether GPUDirect Storage works, asked in a child process by `machine/cufile.py`.

use std::path::PathBuf;

use pyo3::prelude::*;
use ssdtrain_core::cufile::trial;

/// Says whether it works, and the version of cuFile, or why it does not. It raises nothing: a child
/// that asks has none of the package's exceptions.
#[pyfunction]
pub fn try_cufile(
    py: Python<'_>,
    library: Option<PathBuf>,
    directory: PathBuf,
    gpu: usize,
    allows_compat: bool,
) -> (bool, String) {
    let tried = py.detach(move || trial::run(library.as_deref(), &directory, gpu, allows_compat));
    match tried {
        Ok(facts) => {
            (true, format!("cuFile {}.{}", facts.version / 1000, facts.version % 1000 / 10))
        }
        Err(error) => (false, error.to_string()),
    }
}
