//! Writes as sessions do them: given to the disk before their turn, and perhaps needed meanwhile.
//!
//! See [`Writeback`] for the rules; `world.rs` applies them.

use crate::machine::Writeback;
use std::collections::VecDeque;

/// A write that was given to the disk.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// The tensor.
    pub tensor: u32,
    /// Its bytes.
    pub bytes: u64,
    /// True if the life of the tensor has ended. Then only the write holds its memory.
    pub is_dropped: bool,
}

/// The writes that were given to the disk.
#[derive(Clone, Debug)]
pub struct Given {
    /// In the order of their beginning. The channel carries the first.
    writes: VecDeque<Write>,
    bytes: u64,
    /// True for each tensor with a write under way, unless its life has ended.
    is_written: Vec<bool>,
    /// Tensors that are on the disk and still in memory, because no kernel has begun since.
    unfreed: Vec<u32>,
    /// For each tensor the priority of a fetch that was asked for while its write was queued.
    fetches: Vec<Option<f64>>,
}

impl Given {
    /// Starts with no writes. Under the plain rules it stays empty.
    pub fn new(tensor_count: usize, writeback: Option<Writeback>) -> Self {
        let tensor_count = writeback.map_or(0, |_| tensor_count);
        Self {
            writes: VecDeque::new(),
            bytes: 0,
            is_written: vec![false; tensor_count],
            unfreed: Vec::new(),
            fetches: vec![None; tensor_count],
        }
    }

    /// Returns true if a write of a tensor is under way.
    pub fn has(&self, tensor: u32) -> bool {
        self.is_written.get(tensor as usize).is_some_and(|&is_written| is_written)
    }

    /// Notes a fetch of a tensor whose write is queued.
    pub fn ask_later(&mut self, tensor: u32, priority: f64) {
        self.fetches[tensor as usize] = Some(priority);
    }

    /// Forgets the fetch of a tensor that stays in memory.
    pub fn forget_fetch(&mut self, tensor: u32) {
        if let Some(fetch) = self.fetches.get_mut(tensor as usize) {
            *fetch = None;
        }
    }

    /// Leaves the memory of a tensor whose life ends to its write. Returns `false` if it has no
    /// write.
    pub fn drop_tensor(&mut self, tensor: u32) -> bool {
        if !self.has(tensor) {
            return false;
        }
        let own = |write: &&mut Write| write.tensor == tensor && !write.is_dropped;
        let Some(write) = self.writes.iter_mut().find(own) else { return false };
        write.is_dropped = true;
        self.is_written[tensor as usize] = false;
        true
    }

    /// The write that the disk is busy with.
    pub fn first(&self) -> Option<&Write> {
        self.writes.front()
    }

    /// Returns true if another write may be given to the disk.
    pub fn has_room(&self, in_flight_bytes: u64) -> bool {
        self.writes.is_empty() || self.bytes < in_flight_bytes
    }

    /// Gives a write to the disk; returns the priority of a noted fetch.
    pub fn begin(&mut self, tensor: u32, bytes: u64) -> Option<f64> {
        self.writes.push_back(Write { tensor, bytes, is_dropped: false });
        self.bytes += bytes;
        self.is_written[tensor as usize] = true;
        self.fetches[tensor as usize].take()
    }

    /// Ends the oldest write; `None` if there is none.
    pub fn end(&mut self) -> Option<Write> {
        let write = self.writes.pop_front()?;
        self.bytes -= write.bytes;
        if !write.is_dropped {
            self.is_written[write.tensor as usize] = false;
            self.unfreed.push(write.tensor);
        }
        Some(write)
    }

    /// Takes the tensors that were written since the last call. Some may have been needed
    /// meanwhile.
    pub fn take_unfreed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unfreed)
    }
}
