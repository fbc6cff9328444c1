//! `try_cufile` tries GPUDirect Storage; `machine/cufile.py` calls it in a child process.

use std::path::PathBuf;

use pyo3::prelude::*;
use ssdtrain_core::cufile::trial;

/// Returns `true` and the version of cuFile if GPUDirect Storage works, else `false` and the
/// reason. It raises nothing, because the child process has none of the package's exceptions.
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
