//! The offload that hides behind the computing of a round: the longest prefix of its storages that
//! can go to the disk and come back in time.
//!
//! `SSDTrain` (arXiv 2408.10013, section 3.3) solves this once. Here a session solves it after a
//! round, with the times of that round. Writes go one after the other from the front. Reads are
//! chained backwards from their deadlines, and the first read begins after the last write has
//! ended. Storages on a GPU use the link of that GPU too. Storages that stay in the memory of the
//! CPU use only that link.
//!
//! The memory of a GPU is at its peak when forward ends. A storage that has not been copied by then
//! would lower no peak, and its copy would only load the link in backward, so it stays.

/// A storage of a round. Times are in seconds, on any clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Its size.
    pub nbytes: u64,
    /// When it was saved.
    pub packed_s: f64,
    /// When it was first needed.
    pub needed_s: f64,
    /// The GPU that holds it; `None`: the CPU.
    pub gpu: Option<usize>,
}

/// The rates of the copies of a GPU, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copies {
    /// Number of the GPU.
    pub gpu: usize,
    /// Rate from the GPU.
    pub down: f64,
    /// Rate to the GPU.
    pub up: f64,
    /// Bytes of the longest item that can go to the disk; infinite if any can.
    pub longest: f64,
}

/// The rates of all links, and the limits on a round trip.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// Bytes per second to the disk.
    pub write: f64,
    /// Bytes per second from the disk.
    pub read: f64,
    /// The GPUs whose tensors go through the CPU's memory.
    pub copies: Vec<Copies>,
    /// Memory of the CPU in which tensors of these GPUs may stay.
    pub host_bytes: u64,
    /// Size of the pages in which that memory is given out.
    pub page_bytes: u64,
    /// Seconds by which each item has to be back before it is needed.
    pub margin_s: f64,
    /// Multiple of its own round trip for which an item has to lie idle.
    pub round_trip_factor: f64,
}

/// An item that leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaving {
    /// Its index among the items.
    pub place: usize,
    /// The latest start of its way back.
    pub start_by_s: f64,
    /// True if it stays in the memory of the CPU.
    pub is_pinned: bool,
}

/// Chooses the items that leave. Items are in the order of packing.
///
/// An item that is needed again before its round trip could end never leaves. The last items of the
/// prefix stay in the memory of the CPU, as far as it has room.
pub fn hidden(items: &[Item], links: &Links) -> Vec<Leaving> {
    let near = |place: &usize| links.lies_idle(&items[*place], false);
    let near: Vec<usize> = (0..items.len()).filter(near).collect();
    let (mut low, mut high) = (0, near.len());
    let mut leaving = Vec::new();
    while low < high {
        let middle = (low + high).div_ceil(2);
        if let Some(fitting) = links.starts(items, links.divided(items, &near[..middle])) {
            leaving = fitting;
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    leaving
}

impl Links {
    fn of(&self, item: &Item) -> Option<&Copies> {
        self.copies.iter().find(|copies| Some(copies.gpu) == item.gpu)
    }

    /// The rates of the copies of an item's GPU; infinite if they are not known.
    fn copies_of(&self, item: &Item) -> (f64, f64) {
        self.of(item).map_or((f64::INFINITY, f64::INFINITY), |copies| (copies.down, copies.up))
    }

    /// The bytes that an item takes in the memory of the CPU.
    pub fn pages(&self, item: &Item) -> u64 {
        item.nbytes.div_ceil(self.page_bytes) * self.page_bytes
    }

    /// Returns true if an item lies idle for long enough for its round trip.
    fn lies_idle(&self, item: &Item, goes_to_disk: bool) -> bool {
        let (down, up) = self.copies_of(item);
        let nbytes = item.nbytes as f64;
        let mut round_trip_s = nbytes / down + nbytes / up;
        if goes_to_disk || self.of(item).is_none() {
            round_trip_s = round_trip_s + nbytes / self.write + nbytes / self.read;
        }
        item.needed_s - item.packed_s > self.round_trip_factor * round_trip_s + self.margin_s
    }

    /// Returns true if an item has a way to the disk, and lies idle for long enough.
    fn may_go_to_disk(&self, item: &Item) -> bool {
        let longest = self.of(item).map_or(f64::INFINITY, |copies| copies.longest);
        item.nbytes as f64 <= longest && self.lies_idle(item, true)
    }

    /// The items of a prefix that leave, and of these the items that stay in the memory of the CPU.
    /// The starts of their ways back are not set yet.
    fn divided(&self, items: &[Item], prefix: &[usize]) -> Vec<Leaving> {
        let mut left_bytes = self.host_bytes;
        let mut leaving = Vec::with_capacity(prefix.len());
        for &place in prefix.iter().rev() {
            let item = &items[place];
            let is_pinned = self.of(item).is_some() && self.pages(item) <= left_bytes;
            if is_pinned {
                left_bytes -= self.pages(item);
            } else if !self.may_go_to_disk(item) {
                continue;
            }
            leaving.push(Leaving { place, start_by_s: f64::NAN, is_pinned });
        }
        leaving.reverse();
        leaving
    }

    /// The leaving items with the latest start of each way back; `None` if the traffic does not
    /// fit.
    fn starts(&self, items: &[Item], mut leaving: Vec<Leaving>) -> Option<Vec<Leaving>> {
        let mut copied_s = PerGpu::new(0.0);
        let (mut away_s, mut end_s) = (Vec::with_capacity(leaving.len()), 0.0_f64);
        let mut last_packed_s = PerGpu::new(f64::NEG_INFINITY);
        for item in items {
            let last_packed_s = last_packed_s.of(item.gpu);
            *last_packed_s = last_packed_s.max(item.packed_s);
        }
        for entry in &leaving {
            let item = &items[entry.place];
            // The disk gets a tensor of a GPU after it was copied, which is later if the link is
            // behind.
            let copied_s = copied_s.of(item.gpu);
            *copied_s = copied_s.max(item.packed_s) + item.nbytes as f64 / self.copies_of(item).0;
            if item.gpu.is_some() && *copied_s > *last_packed_s.of(item.gpu) {
                return None;
            }
            if !entry.is_pinned {
                end_s = end_s.max(*copied_s) + item.nbytes as f64 / self.write;
            }
            away_s.push(if entry.is_pinned { *copied_s } else { end_s });
        }
        let mut order: Vec<usize> = (0..leaving.len()).collect();
        let needed_s = |number: usize| items[leaving[number].place].needed_s;
        order.sort_by(|&number, &other| needed_s(other).total_cmp(&needed_s(number)));
        let (mut upload_s, mut read_s) = (PerGpu::new(f64::INFINITY), f64::INFINITY);
        for number in order {
            let entry = &mut leaving[number];
            let item = &items[entry.place];
            let upload_s = upload_s.of(item.gpu);
            *upload_s = upload_s.min(item.needed_s - self.margin_s)
                - item.nbytes as f64 / self.copies_of(item).1;
            if !entry.is_pinned {
                read_s = read_s.min(*upload_s) - item.nbytes as f64 / self.read;
            }
            entry.start_by_s = if entry.is_pinned { *upload_s } else { read_s };
            if entry.start_by_s < away_s[number] {
                return None;
            }
        }
        // The disk first writes everything and then reads.
        (read_s >= end_s).then_some(leaving)
    }
}

/// A time for each GPU, and a time for the CPU.
struct PerGpu {
    first_s: f64,
    known: Vec<(Option<usize>, f64)>,
}

impl PerGpu {
    fn new(first_s: f64) -> Self {
        Self { first_s, known: Vec::new() }
    }

    fn of(&mut self, gpu: Option<usize>) -> &mut f64 {
        let place = self.known.iter().position(|(known, _)| *known == gpu).unwrap_or_else(|| {
            self.known.push((gpu, self.first_s));
            self.known.len() - 1
        });
        &mut self.known[place].1
    }
}
