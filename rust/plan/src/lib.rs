//! Which tensor goes where, and when it comes back.
//!
//! A *trace* says what one training step uses and when, a *machine* how much fits where and how
//! fast bytes move. A *plan* is a list of moves. The *simulator* plays a trace under a plan, says
//! how long a step takes, what waited for what and what was resident, and so judges every plan.
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
