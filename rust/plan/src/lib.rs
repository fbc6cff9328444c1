//! Plans: the tensors that leave memory, the tier that each goes to, and the time at which it
//! returns.
//!
//! A *trace* lists the kernels of one training step and their tensors. A *machine* has the
//! capacities and the rates. A *plan* is a list of moves. The *simulator* plays a trace under a
//! plan and reports the time of a step, the waits and the resident bytes; it judges every plan.
//!
//! Nothing here reads a file, a clock or a device: the same input gives the same output everywhere.

pub mod baselines;
pub mod bound;
pub mod channels;
pub mod excess;
pub mod given;
pub mod greedy;
pub mod hidden;
pub mod ledger;
pub mod lookahead;
pub mod machine;
pub mod moves;
pub mod objective;
pub mod outlook;
pub mod planner;
pub mod pruning;
pub mod recompute;
pub mod returns;
pub mod score;
pub mod simulator;
pub mod timeline;
pub mod trace;
pub mod world;
