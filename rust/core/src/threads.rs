//! The state of another thread of this process, as the kernel reports it.

use std::fs;

/// System calls in which a thread waits for something outside of the process, or for time to pass.
const WAITS: &[libc::c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_pwait,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_wait4,
    libc::SYS_waitid,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
];

/// Returns true if the kernel holds a thread in a call in which it waits and computes nothing.
/// Returns false also if that is not known.
///
/// Calls that wait for a lock do not count: threads that compute together wait for each other with
/// them.
pub fn is_waiting(thread: u32) -> bool {
    // The number of the call, or "running".
    let Ok(line) = fs::read_to_string(format!("/proc/self/task/{thread}/syscall")) else {
        return false;
    };
    let number = line.split_whitespace().next().and_then(|word| word.parse().ok());
    number.is_some_and(|number| WAITS.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::is_waiting;
    use std::io::{PipeReader, Read, Write, pipe};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    fn number() -> u32 {
        let link = std::fs::read_link("/proc/thread-self").unwrap();
        link.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn a_thread_that_computes_does_not_wait() {
        let (sender, receiver) = mpsc::channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let computing = thread::spawn(move || {
            sender.send(number()).unwrap();
            while !ends.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let other = receiver.recv().unwrap();
        assert!((0..100).all(|_| !is_waiting(other)));
        is_over.store(true, Ordering::Relaxed);
        computing.join().unwrap();
    }

    #[test]
    fn a_thread_that_reads_from_a_pipe_waits() {
        let (mut reader, mut writer): (PipeReader, _) = pipe().unwrap();
        let (sender, receiver) = mpsc::channel();
        let waiting = thread::spawn(move || {
            sender.send(number()).unwrap();
            reader.read_exact(&mut [0]).unwrap();
        });
        let other = receiver.recv().unwrap();
        while !is_waiting(other) {
            thread::yield_now();
        }
        writer.write_all(&[1]).unwrap();
        waiting.join().unwrap();
        assert!(!is_waiting(other), "it is gone");
    }
}
