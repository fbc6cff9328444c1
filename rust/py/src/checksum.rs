//! `checksum` of the bytes of a tensor: another value shows a change.
#![expect(unsafe_code, reason = "takes the address of a tensor")]

use std::slice;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ssdtrain_core as core;

/// A checksum of at least this many bytes releases the GIL; for fewer that costs more than it
/// gives.
const DETACHED_BYTES_MIN: usize = 1 << 20;

/// The xxh3 checksum of the elements of a strided tensor, in the order in which they lie in memory.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists of Python")]
pub fn checksum(
    py: Python<'_>,
    address: usize,
    item_bytes: usize,
    sizes: Vec<usize>,
    strides: Vec<usize>,
) -> PyResult<u64> {
    if sizes.len() != strides.len() {
        return Err(PyValueError::new_err("a tensor has as many strides as sizes"));
    }
    let form = Form::new(item_bytes, &sizes, &strides);
    if form.nbytes() == 0 {
        return Ok(core::checksum_of(&[]));
    }
    if address == 0 {
        return Err(PyValueError::new_err("no byte lies at address 0"));
    }
    let sum = || {
        let mut sum = core::Checksum::default();
        form.each_run(&mut |offset| {
            // SAFETY: the caller passes the address, sizes and strides of a tensor that it holds
            // and that nobody changes before this returns. `offset` is that of an element, and the
            // run is of elements without a gap between them.
            sum.update(unsafe { run_at(address + offset, form.run_bytes) });
        });
        sum.value()
    };
    Ok(if form.nbytes() < DETACHED_BYTES_MIN { sum() } else { py.detach(sum) })
}

/// # Safety
///
/// `nbytes` bytes from `address` can be read, and nobody changes them while the slice is used.
unsafe fn run_at<'a>(address: usize, nbytes: usize) -> &'a [u8] {
    // SAFETY: the caller promises it.
    unsafe { slice::from_raw_parts(address as *const u8, nbytes) }
}

/// A tensor as runs of bytes without gaps, each element once.
#[derive(Debug, PartialEq, Eq)]
struct Form {
    run_bytes: usize,
    /// Count and distance in bytes of runs, or of groups of runs; the largest distance first.
    outer: Vec<(usize, usize)>,
}

impl Form {
    fn new(item_bytes: usize, sizes: &[usize], strides: &[usize]) -> Self {
        if sizes.contains(&0) {
            return Self { run_bytes: 0, outer: Vec::new() };
        }
        // An expanded dimension repeats the same bytes.
        let mut dimensions: Vec<_> = sizes
            .iter()
            .zip(strides)
            .filter(|&(&size, &stride)| size > 1 && stride > 0)
            .map(|(&size, &stride)| (size, stride * item_bytes))
            .collect();
        dimensions.sort_by_key(|&(_, apart)| apart);
        let (mut run_bytes, mut outer) = (item_bytes, Vec::<(usize, usize)>::new());
        for (count, apart) in dimensions {
            match outer.last_mut() {
                None if apart == run_bytes => run_bytes *= count,
                Some((inner, inner_apart)) if apart == *inner * *inner_apart => *inner *= count,
                _ => outer.push((count, apart)),
            }
        }
        outer.reverse();
        Self { run_bytes, outer }
    }

    fn nbytes(&self) -> usize {
        self.outer.iter().map(|&(count, _)| count).product::<usize>() * self.run_bytes
    }

    fn each_run(&self, visit: &mut impl FnMut(usize)) {
        visit_runs(&self.outer, 0, visit);
    }
}

fn visit_runs(outer: &[(usize, usize)], offset: usize, visit: &mut impl FnMut(usize)) {
    let Some((&(count, apart), inner)) = outer.split_first() else { return visit(offset) };
    for place in 0..count {
        visit_runs(inner, offset + place * apart, visit);
    }
}
