//! `MasterCode`: float32 masters of bfloat16 weights packed and unpacked, with the GIL released.
#![expect(unsafe_code, reason = "takes addresses of tensors")]

use std::slice;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ssdtrain_core::masters::{self as core, is_rounded, payload_len_max};

#[pyclass(frozen, module = "ssdtrain._core")]
pub struct MasterCode(core::MasterCode);

#[pymethods]
impl MasterCode {
    #[staticmethod]
    fn payload_len_max(count: usize) -> usize {
        payload_len_max(count)
    }

    #[staticmethod]
    fn is_rounded(py: Python<'_>, weights: usize, masters: usize, count: usize) -> PyResult<bool> {
        let (weights, masters) = (read::<u16>(weights, count)?, read::<u32>(masters, count)?);
        Ok(py.detach(|| is_rounded(weights, masters)))
    }

    #[staticmethod]
    fn pack(
        py: Python<'_>,
        weights: usize,
        masters: usize,
        payload: usize,
        count: usize,
    ) -> PyResult<Option<Self>> {
        let weights = read::<u16>(weights, count)?;
        let masters = read::<u32>(masters, count)?;
        let payload = write::<i16>(payload, payload_len_max(count))?;
        Ok(py.detach(|| core::MasterCode::pack(weights, masters, payload)).map(Self))
    }

    #[getter]
    fn payload_len(&self) -> usize {
        self.0.payload_len()
    }

    fn unpack(
        &self,
        py: Python<'_>,
        weights: usize,
        payload: usize,
        masters: usize,
    ) -> PyResult<bool> {
        let weights = read::<u16>(weights, self.0.weight_count())?;
        let payload = read::<i16>(payload, self.0.payload_len())?;
        let masters = write::<u32>(masters, self.0.weight_count())?;
        Ok(py.detach(|| self.0.unpack(weights, payload, masters)))
    }
}

fn read<'a, T>(address: usize, len: usize) -> PyResult<&'a [T]> {
    refuse_unusable::<T>(address)?;
    // SAFETY: the caller passes the address of `len` such numbers in a tensor that it holds, and
    // which nobody changes before the call has returned; it is not null and aligned.
    Ok(unsafe { slice::from_raw_parts(address as *const T, len) })
}

fn write<'a, T>(address: usize, len: usize) -> PyResult<&'a mut [T]> {
    refuse_unusable::<T>(address)?;
    // SAFETY: as above, of a tensor that was made for this call and that nobody else has.
    Ok(unsafe { slice::from_raw_parts_mut(address as *mut T, len) })
}

fn refuse_unusable<T>(address: usize) -> PyResult<()> {
    if address == 0 || !address.is_multiple_of(align_of::<T>()) {
        return Err(PyValueError::new_err(format!("no number lies at address {address:#x}")));
    }
    Ok(())
}
