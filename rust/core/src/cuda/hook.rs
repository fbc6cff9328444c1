//! Calls of the driver that the steps of one hook of autograd share.
//!
//! Several steps of a hook ask if a stream is captured, and record events on it. Within a [`Hook`]
//! the driver is asked once about the stream of the thread, and a step that only needs a time takes
//! the last event. An event that orders work is always recorded anew. Another thread may begin to
//! capture any other stream meanwhile, so each step asks about those.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::cuda::gpu::Gpu;
use crate::cuda::stream::{Event, UserStream};

thread_local! {
    static CURRENT: RefCell<Option<Known>> = const { RefCell::new(None) };
}

/// The answers that one hook has got.
#[derive(Default)]
struct Known {
    /// The number of a GPU, and the stream of it that is current in this thread.
    stream: Option<(usize, UserStream)>,
    is_uncaptured: bool,
    last: Option<Arc<Event>>,
}

/// A hook that runs in this thread, until this is dropped.
#[derive(Debug)]
pub struct Hook {
    is_nested: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl Hook {
    /// Begins a hook, which knows nothing of a hook around it.
    pub fn enter() -> Self {
        let outer = CURRENT.replace(Some(Known::default()));
        Self { is_nested: outer.is_some(), _of_this_thread: PhantomData }
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        // The hook around it asks anew.
        let ended = CURRENT.replace(self.is_nested.then(Known::default));
        drop(ended);
    }
}

/// Tells the hook of this thread its stream, which is current in the thread.
pub fn set_stream(gpu: usize, stream: UserStream) {
    if matching(gpu, stream, |_| ()).is_none() {
        let known = Known { stream: Some((gpu, stream)), ..Known::default() };
        let is_in_hook = CURRENT.with_borrow(Option::is_some);
        let before = if is_in_hook { CURRENT.replace(Some(known)) } else { None };
        drop(before);
    }
}

/// Forgets all answers of this hook, before it waits or computes: the program may do anything then.
pub fn forget() {
    let before = CURRENT.with_borrow_mut(|known| known.as_mut().map(std::mem::take));
    drop(before);
}

/// Returns true if the driver said in this hook that the stream is not captured.
pub(super) fn is_uncaptured(gpu: &Gpu, stream: UserStream) -> bool {
    matching(gpu.ordinal(), stream, |known| known.is_uncaptured) == Some(true)
}

pub(super) fn note_uncaptured(gpu: &Gpu, stream: UserStream) {
    matching(gpu.ordinal(), stream, |known| known.is_uncaptured = true);
}

/// The event with a time that this hook recorded last on the stream, if it is the hook's own.
pub fn last_event(gpu: usize, stream: UserStream) -> Option<Arc<Event>> {
    matching(gpu, stream, |known| known.last.clone())?
}

pub(super) fn note_event(gpu: &Gpu, stream: UserStream, event: &Arc<Event>) {
    let before = matching(gpu.ordinal(), stream, |known| known.last.replace(Arc::clone(event)));
    drop(before);
}

/// Looks at what this hook knows of the stream, if it is the hook's own.
fn matching<T>(gpu: usize, stream: UserStream, look: impl FnOnce(&mut Known) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| {
        let known = current.as_mut().filter(|known| known.stream == Some((gpu, stream)));
        known.map(look)
    })
}
