//! The machine that a plan is for: capacities, and rates of transfers.

/// A place outside of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The drives: slow, without a limit.
    Ssd,
    /// The host's memory: fast and limited.
    Host,
}

impl Tier {
    /// Both tiers, in the order in which the simulator starts their transfers.
    pub const ALL: [Self; 2] = [Self::Ssd, Self::Host];
}

/// The direction of bytes, seen from the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Away, to a tier.
    Out,
    /// Back.
    In,
}

/// A rate for each direction, in bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Away from the device.
    pub out: f64,
    /// Back to it.
    pub back: f64,
}

impl Rates {
    /// The rate of one direction.
    pub fn of(&self, way: Way) -> f64 {
        match way {
            Way::Out => self.out,
            Way::In => self.back,
        }
    }
}

/// The share of its full rate that a transfer of a size reaches: four points in rising order of
/// bytes, straight lines between them. With (1 MiB, 0.5) and (4 MiB, 1.0) a transfer of 2.5 MiB has
/// 0.75.
#[derive(Clone, Copy, Debug)]
pub struct SizeShares(pub [(u64, f64); 4]);

impl SizeShares {
    /// The share of a transfer, above 0.
    pub fn of(&self, bytes: u64) -> f64 {
        let points = &self.0;
        let after = points.partition_point(|point| point.0 <= bytes);
        if after == 0 {
            return points[0].1;
        }
        let Some(high) = points.get(after) else { return points[after - 1].1 };
        let low = points[after - 1];
        let part = (bytes - low.0) as f64 / (high.0 - low.0) as f64;
        low.1 + part * (high.1 - low.1)
    }
}

impl Default for SizeShares {
    fn default() -> Self {
        Self([(0, 1.0); 4])
    }
}

/// The writes of a session. The plain rules of the simulator do not have them: under those a
/// transfer waits in the queue until the channel is idle, and a tensor is in one place.
///
/// - A write is *given* to the disk before its turn, while fewer than `in_flight_bytes` are under
///   way. A write can be cancelled until it was given; after that it is carried out.
/// - A kernel that needs a tensor on its way to the disk uses it from memory, without a wait.
/// - A fetch of a tensor whose write is queued comes after the write and does not cancel it. The
///   kernel that needs the tensor cancels the write.
/// - Memory of a written tensor is free when the next kernel begins: a session looks in its hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writeback {
    /// Bytes under way to the drives at which no more is given to them.
    pub in_flight_bytes: u64,
}

/// Capacities and rates. By default nothing has a limit or a cost.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Memory of the computing device.
    pub device_bytes: u64,
    /// Usable memory of the host; 0 if there is none.
    pub host_bytes: u64,
    /// The drives.
    pub ssd: Rates,
    /// The bus that host and drives share. Transfers of the host get the rest that the drives
    /// leave.
    pub bus: Rates,
    /// Time of each transfer before its first byte.
    pub latency_s: f64,
    /// The rates of copies to and from the host's memory, as far as the bus allows.
    pub host: Rates,
    /// The share of its rate that each way of the drives keeps while the other is busy.
    pub duplex_share: f64,
    /// The dependence of the drives' rates on the size of a transfer.
    pub sizes: SizeShares,
    /// The price of a byte: seconds of computing lost for each byte that moves.
    pub price: Rates,
    /// The writes of a session to the drives; `None` for the plain rules.
    pub writeback: Option<Writeback>,
}

impl Default for Machine {
    fn default() -> Self {
        // Not infinite, so that the rest of a rate is a number.
        let unlimited = Rates { out: 1e15, back: 1e15 };
        Self {
            device_bytes: u64::MAX >> 1,
            host_bytes: 0,
            ssd: unlimited,
            bus: unlimited,
            latency_s: 0.0,
            host: unlimited,
            duplex_share: 1.0,
            sizes: SizeShares::default(),
            price: Rates { out: 0.0, back: 0.0 },
            writeback: None,
        }
    }
}

impl Machine {
    /// The rate of a transfer. `ssd_busy` says that the drives move bytes in the same direction.
    pub fn rate(&self, tier: Tier, way: Way, ssd_busy: bool) -> f64 {
        match tier {
            Tier::Ssd => self.ssd.of(way),
            Tier::Host if ssd_busy => (self.bus.of(way) - self.ssd.of(way)).min(self.host.of(way)),
            Tier::Host => self.bus.of(way).min(self.host.of(way)),
        }
    }

    /// Bytes of a transfer at the full rate of its tier: small transfers count as more.
    pub fn charged_bytes(&self, tier: Tier, bytes: u64) -> f64 {
        match tier {
            Tier::Ssd => bytes as f64 / self.sizes.of(bytes),
            Tier::Host => bytes as f64,
        }
    }

    /// Returns true if computing is slower while bytes move.
    pub fn has_price(&self) -> bool {
        self.price.out > 0.0 || self.price.back > 0.0
    }
}
