//! The director that looks one step ahead. Its moves become a plan.
//!
//! At the end of each kernel it computes the bytes that will not fit (the *outlook*). Then it
//! decides in turn: evictions that the next kernel needs, writes to the drives, evictions to the
//! host because the drives are too slow, and fetches. It evicts the tensors that cover the excess
//! for longest.

use crate::channels::channel;
use crate::machine::{Machine, Tier, Way};
use crate::moves::{Action, Move};
use crate::outlook::Outlook;
use crate::returns::Returns;
use crate::simulator::{Director, Place, World};
use crate::trace::{Places, Trace};

/// The weights of the director. A planner tries several.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Seconds of work that channels get beyond the next kernel.
    pub window_s: f64,
    /// Seconds by which evictions should end early.
    pub margin_s: f64,
    /// The share of the device's memory that stays free.
    pub reserve: f64,
    /// The share of the excess that a tensor has to cover to leave before it must.
    pub cover_share: f64,
    /// Largest time before its use at which a tensor comes back, as a multiple of its transfer.
    pub lead: f64,
    /// The share of its rate at which evictions to the host are expected to go on.
    pub host_trust: f64,
    /// Time before its use at which a tensor comes back from the host, as a multiple of its
    /// transfer.
    pub host_lead: f64,
}

/// A move that was decided in a step.
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    /// The step.
    pub step: usize,
    /// The move, with its kernel within the step.
    pub chosen: Move,
}

/// The director.
pub struct LookAhead<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    weights: Weights,
    outlook: Outlook,
    /// For each tensor the index of its next use in its list of users, and the step of that use.
    next: Vec<(usize, usize)>,
    /// Globals that are used, and the living locals.
    alive: Vec<u32>,
    /// Smallest size of a tensor that leaves: a move of fewer bytes is worth nothing.
    smallest: u64,
    /// All decisions, in order.
    pub decisions: Vec<Decision>,
    after: usize,
}

const NEVER: usize = usize::MAX;

impl<'a> LookAhead<'a> {
    /// For steps in which each kernel takes its time in `seconds`, its wait included.
    pub fn new(trace: &'a Trace, machine: &'a Machine, seconds: &[f64], weights: Weights) -> Self {
        let count = trace.tensors().len();
        Self {
            trace,
            machine,
            weights,
            outlook: Outlook::new(trace, machine, seconds, weights.reserve),
            next: vec![(0, 0); count],
            alive: (0..count as u32)
                .filter(|&tensor| trace.tensors()[tensor as usize].is_global)
                .filter(|&tensor| !trace.users(tensor).is_empty())
                .collect(),
            smallest: machine.device_bytes >> 15,
            decisions: Vec::new(),
            after: 0,
        }
    }

    fn bytes(&self, tensor: u32) -> u64 {
        self.trace.tensors()[tensor as usize].bytes
    }

    /// The next kernel that uses a tensor, counted from the first step.
    fn next_use(&self, tensor: u32) -> usize {
        let (place, step) = self.next[tensor as usize];
        match self.trace.users(tensor).get(place) {
            Some(&kernel) => step * self.trace.kernels().len() + kernel as usize,
            None => NEVER,
        }
    }

    fn advance(&mut self, kernel: usize) {
        let count = self.trace.kernels().len();
        self.alive.extend(self.trace.births(kernel % count));
        let dead = self.trace.deaths(kernel % count);
        if !dead.is_empty() {
            self.alive.retain(|tensor| !dead.contains(tensor));
        }
        for &tensor in &self.trace.kernels()[kernel % count].uses {
            let (place, step) = &mut self.next[tensor as usize];
            *place += 1;
            if *place == self.trace.users(tensor).len() {
                (*place, *step) = (0, *step + 1);
            }
        }
    }

    fn seconds_of(&self, tensor: u32, tier: Tier, way: Way) -> f64 {
        let charged = self.machine.charged_bytes(tier, self.bytes(tensor));
        charged / self.machine.rate(tier, way, true) + self.machine.latency_s
    }

    fn decide(&mut self, tensor: u32, action: Action, priority: f64, moves: &mut Vec<Move>) {
        let count = self.trace.kernels().len();
        let step = self.after / count;
        let chosen = Move { tensor, action, after: (self.after % count) as u32, priority };
        self.decisions.push(Decision { step, chosen });
        moves.push(chosen);
    }
}

/// A tensor that is not in memory, or soon will not be.
#[derive(Clone, Copy, Debug)]
struct Missing {
    tensor: u32,
    tier: Tier,
    /// Seconds from now until its memory is free.
    from_s: f64,
    next: usize,
    /// Latest start of its way back, in seconds from now.
    back_s: f64,
}

/// The state of one instant, for the director.
struct Scene {
    /// Tensors in memory that are not about to leave and not used by the next kernel, with the next
    /// use.
    candidates: Vec<(u32, usize)>,
    /// Tensors that are away, leaving or queued to leave, with no fetch, by next use.
    missing: Vec<Missing>,
    /// The transfers back from the drives.
    returns: Returns,
    /// Seconds of work that each channel has.
    queued_s: [f64; 4],
    /// Bytes of the host that are taken, or will be.
    host_bytes: u64,
}

impl LookAhead<'_> {
    fn survey(&mut self, world: &World) -> Scene {
        let count = self.trace.kernels().len();
        let wanted = &self.trace.kernels()[(self.after + 1) % count].uses;
        let mut scene = Scene {
            candidates: Vec::new(),
            missing: Vec::new(),
            returns: Returns::default(),
            queued_s: [0.0; 4],
            host_bytes: world.host_used_bytes(),
        };
        for &tensor in &self.alive {
            let next = self.next_use(tensor);
            if world.is_queued(tensor) || next == NEVER {
                continue;
            }
            match world.place(tensor) {
                Place::Device
                    if self.bytes(tensor) >= self.smallest
                        && self.trace.tensors()[tensor as usize].places != Places::NONE
                        && !wanted.contains(&tensor) =>
                {
                    scene.candidates.push((tensor, next));
                }
                Place::Away(tier) => {
                    scene.missing.push(Missing { tensor, tier, from_s: 0.0, next, back_s: 0.0 });
                }
                _ => {}
            }
        }
        for tier in Tier::ALL {
            for way in [Way::Out, Way::In] {
                self.survey_channel(world, tier, way, &mut scene);
            }
        }
        self.look(&mut scene);
        scene
    }

    fn survey_channel(&self, world: &World, tier: Tier, way: Way, scene: &mut Scene) {
        let on = channel(tier, way);
        let mut end = world.channels().busy_for(on, world.now());
        let mut add = |tensor, from_s| {
            let next = self.next_use(tensor);
            scene.missing.push(Missing { tensor, tier, from_s, next, back_s: 0.0 });
        };
        if let (Way::Out, Some(tensor)) = (way, world.channels().carries(on)) {
            // It may have a fetch already.
            if !world.is_queued(tensor) {
                add(tensor, end);
            }
        }
        for (_, tensor) in world.channels().queue(on) {
            end += self.seconds_of(tensor, tier, way);
            if way == Way::Out {
                add(tensor, end);
                scene.host_bytes += if tier == Tier::Host { self.bytes(tensor) } else { 0 };
            }
        }
        scene.queued_s[on] = end;
    }

    /// Computes the returns of missing tensors and the excess again.
    fn look(&mut self, scene: &mut Scene) {
        self.outlook.begin(self.after + 1);
        scene.missing.sort_unstable_by_key(|missing| (missing.next, missing.tensor));
        let ssd = |missing: &&mut Missing| missing.tier == Tier::Ssd;
        let transfers: Vec<(f64, f64)> = scene
            .missing
            .iter()
            .filter(|missing| missing.tier == Tier::Ssd)
            .map(|missing| {
                let seconds = self.seconds_of(missing.tensor, Tier::Ssd, Way::In);
                (self.outlook.seconds_to(missing.next) - self.weights.margin_s, seconds)
            })
            .collect();
        scene.returns.chain(transfers.into_iter());
        for (place, missing) in scene.missing.iter_mut().filter(ssd).enumerate() {
            let earliest = self.earliest_return(missing.tensor, missing.next);
            missing.back_s = scene.returns.start(place).max(earliest);
        }
        for missing in scene.missing.iter_mut().filter(|missing| missing.tier == Tier::Host) {
            missing.back_s = self.host_return(missing.tensor, missing.next);
        }
        let away: Vec<_> = scene
            .missing
            .iter()
            .map(|missing| (self.bytes(missing.tensor), missing.from_s, missing.back_s))
            .collect();
        self.outlook.look(self.after + 1, &away);
    }

    /// The earliest return of a tensor from the drives: `lead` transfers before its use.
    fn earliest_return(&self, tensor: u32, next: usize) -> f64 {
        let seconds = self.seconds_of(tensor, Tier::Ssd, Way::In);
        self.outlook.seconds_to(next) - self.weights.margin_s - self.weights.lead * seconds
    }

    fn host_return(&self, tensor: u32, next: usize) -> f64 {
        self.outlook.seconds_to(next)
            - self.weights.host_lead * self.seconds_of(tensor, Tier::Host, Way::In)
            - self.weights.margin_s
    }

    /// Seconds of excess that a candidate covers if it leaves to a tier now.
    fn covered(&self, scene: &Scene, tensor: u32, next: usize, tier: Tier) -> f64 {
        let from =
            scene.queued_s[channel(tier, Way::Out)] + self.seconds_of(tensor, tier, Way::Out);
        let until = match tier {
            Tier::Host => self.host_return(tensor, next),
            Tier::Ssd => {
                let deadline = self.outlook.seconds_to(next) - self.weights.margin_s;
                let seconds = self.seconds_of(tensor, tier, Way::In);
                let front = scene.returns.front_with(deadline, seconds);
                front.max(self.earliest_return(tensor, next))
            }
        };
        self.outlook.short_seconds(from, until)
    }

    /// The candidate that covers the excess for longest, with its seconds.
    fn best(&self, scene: &Scene, tier: Tier) -> Option<(usize, f64)> {
        let mut best: Vec<(f64, usize, usize)> = Vec::new();
        for (place, &(tensor, next)) in scene.candidates.iter().enumerate() {
            if !self.trace.tensors()[tensor as usize].places.has(tier) {
                continue;
            }
            let covered = self.covered(scene, tensor, next, tier);
            if covered > 0.0 {
                best.push((covered, next, place));
            }
        }
        best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        best.truncate(8);
        best.into_iter()
            .map(|(covered, next, place)| {
                let (tensor, _) = scene.candidates[place];
                let share = self.outlook.covered(self.bytes(tensor), next);
                (place, covered.min(share), next)
            })
            .max_by(|a, b| a.1.total_cmp(&b.1).then(a.2.cmp(&b.2)))
            .map(|(place, covered, _)| (place, covered))
    }

    fn evict(
        &mut self,
        scene: &mut Scene,
        place: usize,
        tier: Tier,
        priority: f64,
        moves: &mut Vec<Move>,
    ) {
        let (tensor, next) = scene.candidates.swap_remove(place);
        let from_s = &mut scene.queued_s[channel(tier, Way::Out)];
        *from_s += self.seconds_of(tensor, tier, Way::Out);
        scene.missing.push(Missing { tensor, tier, from_s: *from_s, next, back_s: 0.0 });
        if tier == Tier::Host {
            scene.host_bytes += self.bytes(tensor);
        }
        self.look(scene);
        self.decide(tensor, Action::Evict(tier), priority, moves);
    }

    /// Returns true if the queued evictions are too few: no more are decided before the next kernel
    /// ends.
    fn is_behind(&self, bytes_per_s: f64, queued_s: f64) -> bool {
        let from = queued_s.max(self.outlook.starts[1] + self.weights.margin_s);
        self.outlook.is_behind(bytes_per_s, from)
    }

    fn fits_host(&self, scene: &Scene, place: usize) -> bool {
        let (tensor, _) = scene.candidates[place];
        self.trace.tensors()[tensor as usize].places.host
            && scene.host_bytes + self.bytes(tensor) <= self.machine.host_bytes
    }

    /// Evicts tensors that have to leave before the next kernel can start.
    fn make_room(&mut self, world: &World, scene: &mut Scene, moves: &mut Vec<Move>) {
        let count = self.trace.kernels().len();
        let first = (self.after + 1) % count;
        let mut wanted = world.used_bytes() - world.leaving_bytes();
        for &tensor in &self.trace.kernels()[first].uses {
            match world.place(tensor) {
                Place::Nowhere | Place::Away(_) | Place::Leaving(_) => {
                    wanted += self.bytes(tensor);
                }
                Place::Device if world.is_queued(tensor) => wanted += self.bytes(tensor),
                _ => {}
            }
        }
        while wanted > self.machine.device_bytes {
            let tier = if self.machine.host_bytes > 0 { Tier::Host } else { Tier::Ssd };
            let farthest = || (0..scene.candidates.len()).max_by_key(|&at| scene.candidates[at].1);
            let Some(place) = self.best(scene, tier).map(|(place, _)| place).or_else(farthest)
            else {
                return;
            };
            let tier = if self.fits_host(scene, place) { Tier::Host } else { Tier::Ssd };
            if !self.trace.tensors()[scene.candidates[place].0 as usize].places.has(tier) {
                scene.candidates.swap_remove(place);
                continue;
            }
            wanted -= self.bytes(scene.candidates[place].0);
            self.evict(scene, place, tier, -1.0, moves);
        }
    }

    fn write_to_drives(&mut self, scene: &mut Scene, window: f64, moves: &mut Vec<Move>) {
        let out = channel(Tier::Ssd, Way::Out);
        while scene.queued_s[out] < window {
            let Some((place, covered)) = self.best(scene, Tier::Ssd) else { return };
            let (tensor, next) = scene.candidates[place];
            let enough = if self.fits_host(scene, place) {
                self.weights.cover_share * self.covered(scene, tensor, next, Tier::Host)
            } else if self.is_behind(self.machine.ssd.out, scene.queued_s[out]) {
                0.0
            } else {
                self.weights.cover_share * self.outlook.all_short_seconds()
            };
            if covered < enough {
                return;
            }
            self.evict(scene, place, Tier::Ssd, 0.0, moves);
        }
    }

    fn copy_to_host(&mut self, scene: &mut Scene, moves: &mut Vec<Move>) {
        let rate = self.machine.rate(Tier::Host, Way::Out, true) * self.weights.host_trust;
        let out = channel(Tier::Host, Way::Out);
        while self.is_behind(rate, scene.queued_s[out]) {
            let Some((place, _)) = self.best(scene, Tier::Host) else { return };
            if !self.fits_host(scene, place) {
                return;
            }
            self.evict(scene, place, Tier::Host, 0.0, moves);
        }
    }

    /// Returns true if a tensor can come back now and stay until its use. Tensors on the drives
    /// with later uses come back later.
    fn has_room(&mut self, scene: &Scene, asked: Missing) -> bool {
        let away: Vec<_> = scene
            .missing
            .iter()
            .map(|missing| {
                let until_s = match missing.tier {
                    Tier::Ssd => self.outlook.seconds_to(missing.next),
                    Tier::Host => missing.back_s,
                };
                (self.bytes(missing.tensor), missing.from_s, until_s)
            })
            .collect();
        self.outlook.look_for_room(&away);
        self.outlook.has_room(self.bytes(asked.tensor), self.outlook.seconds_to(asked.next))
    }

    fn fetch(&mut self, world: &World, scene: &mut Scene, window: f64, moves: &mut Vec<Move>) {
        let count = self.trace.kernels().len();
        let step_start = self.after / count * count;
        for tier in Tier::ALL {
            let on = channel(tier, Way::In);
            let mut place = 0;
            while let Some(&missing) = scene.missing.get(place) {
                let asks = missing.tier == tier
                    && matches!(world.place(missing.tensor), Place::Away(_) | Place::Leaving(_));
                if !asks {
                    place += 1;
                    continue;
                }
                if scene.queued_s[on] > window {
                    break;
                }
                let is_due = missing.back_s <= window;
                let is_early = tier == Tier::Ssd && self.has_room(scene, missing);
                if !is_due && !is_early {
                    if tier == Tier::Host {
                        place += 1;
                        continue;
                    }
                    break;
                }
                scene.queued_s[on] += self.seconds_of(missing.tensor, tier, Way::In);
                scene.missing.remove(place);
                self.look(scene);
                let priority = (missing.next - step_start) as f64;
                self.decide(missing.tensor, Action::Fetch, priority, moves);
            }
        }
    }
}

impl Director for LookAhead<'_> {
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>) {
        self.after = kernel;
        self.advance(kernel);
        let mut scene = self.survey(world);
        let window = self.outlook.starts[1] + self.weights.window_s;
        self.make_room(world, &mut scene, moves);
        self.write_to_drives(&mut scene, window, moves);
        if self.machine.host_bytes > 0 {
            self.copy_to_host(&mut scene, moves);
        }
        self.fetch(world, &mut scene, window, moves);
    }
}
