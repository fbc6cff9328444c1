//! Writes as sessions do them: given to the disk before their turn, and needed meanwhile.
//!
//! See [`Writeback`] for the rules, and `world.rs` for what comes of them.

use crate::machine::Writeback;
use std::collections::VecDeque;

/// One write that was given to the disk.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Which tensor.
    pub tensor: u32,
    /// Its bytes.
    pub bytes: u64,
    /// Whether the tensor has ended its life meanwhile. The write holds its memory alone then.
    pub is_dropped: bool,
}

/// What was given to the disk, and what became of it.
#[derive(Clone, Debug)]
pub struct Given {
    /// In the order of their beginning; the channel carries the first.
    writes: VecDeque<Write>,
    bytes: u64,
    /// Which tensors have a write under way; not those whose lives have ended.
    is_written: Vec<bool>,
    /// Tensors that are on the disk and still in memory: nobody has looked since.
    unfreed: Vec<u32>,
    /// The priorities of fetches that were asked for while the write was queued.
    fetches: Vec<Option<f64>>,
}

impl Given {
    /// Nothing was given. By the plain rules, without a writeback, it stays empty.
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

    /// Whether a write of a tensor is under way.
    pub fn has(&self, tensor: u32) -> bool {
        self.is_written.get(tensor as usize).is_some_and(|&is_written| is_written)
    }

    /// Fetch a tensor once its write, which is queued, has ended.
    pub fn ask_later(&mut self, tensor: u32, priority: f64) {
        self.fetches[tensor as usize] = Some(priority);
    }

    /// A tensor stays in memory, so it need not be fetched.
    pub fn forget_fetch(&mut self, tensor: u32) {
        if let Some(fetch) = self.fetches.get_mut(tensor as usize) {
            *fetch = None;
        }
    }

    /// Leave the memory of a tensor whose life ends to its write; `false` if there is none.
    pub fn drop_tensor(&mut self, tensor: u32) -> bool {
        if !self.has(tensor) {
            return false;
        }
        let own = |one: &&mut Write| one.tensor == tensor && !one.is_dropped;
        let Some(write) = self.writes.iter_mut().find(own) else { return false };
        write.is_dropped = true;
        self.is_written[tensor as usize] = false;
        true
    }

    /// The write that the disk is busy with.
    pub fn first(&self) -> Option<&Write> {
        self.writes.front()
    }

    /// Whether another write may be given to the disk.
    pub fn has_room(&self, in_flight_bytes: u64) -> bool {
        self.writes.is_empty() || self.bytes < in_flight_bytes
    }

    /// A write is given to the disk; returns the priority of the fetch that was asked for.
    pub fn begin(&mut self, tensor: u32, bytes: u64) -> Option<f64> {
        self.writes.push_back(Write { tensor, bytes, is_dropped: false });
        self.bytes += bytes;
        self.is_written[tensor as usize] = true;
        self.fetches[tensor as usize].take()
    }

    /// The oldest write has ended; none if nothing was given.
    pub fn end(&mut self) -> Option<Write> {
        let write = self.writes.pop_front()?;
        self.bytes -= write.bytes;
        if !write.is_dropped {
            self.is_written[write.tensor as usize] = false;
            self.unfreed.push(write.tensor);
        }
        Some(write)
    }

    /// What was written since the last look, and may be needed again meanwhile.
    pub fn take_unfreed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unfreed)
    }
}
