//! The signals that end a launch, and SIGCHLD.
//!
//! Invariant: ending signals are caught while a launch runs or a caller asks for it, and have their
//! default effect otherwise.

use crate::sync::locked;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// What ends a program from outside.
const ENDING: [(Signal, i32); 4] = [
    (Signal::INT, SIGINT),
    (Signal::TERM, SIGTERM),
    (Signal::QUIT, SIGQUIT),
    (Signal::HUP, SIGHUP),
];

/// Notes SIGINT, SIGTERM, SIGQUIT and SIGHUP for as long as this lives. For programs that clean up
/// before they end. An ignored SIGHUP stays ignored.
#[derive(Debug)]
pub struct Signals {
    noted: Vec<(Signal, Arc<AtomicBool>, SigId)>,
}

/// None before this process's first launch.
static CATCHING: Mutex<Option<Catching>> = Mutex::new(None);

/// What the launches of a process have in common.
struct Catching {
    launches: usize,
    /// Whether none does: then the signals end the process.
    idle: Arc<AtomicBool>,
    /// Which signals are caught: all but a SIGHUP that was ignored before the first launch.
    caught: Vec<(Signal, i32)>,
}

impl Catching {
    fn first() -> io::Result<Self> {
        let idle = Arc::new(AtomicBool::new(true));
        // A program under `nohup` outlives its terminal, and its ranks ignore the signal too.
        let caught: Vec<_> = ENDING
            .into_iter()
            .filter(|&(signal, number)| signal != Signal::HUP || !ignored(number))
            .collect();
        for &(_, number) in &caught {
            signal_hook::flag::register_conditional_default(number, Arc::clone(&idle))?;
        }
        Ok(Self { launches: 0, idle, caught })
    }
}

/// Whether this process ignores the signal, as the kernel says it; not where it does not say.
fn ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (number - 1) & 1 == 1)
}

/// Makes this process learn how its children end; call it first thing in `main`.
///
/// A parent may have set SIGCHLD to ignored, which exec keeps: waiting for children then fails.
///
/// # Errors
/// The system's.
pub fn hear_of_children() -> io::Result<()> {
    if ignored(SIGCHLD) {
        signal_hook::flag::register(SIGCHLD, Arc::default())?;
    }
    Ok(())
}

impl Signals {
    /// Notes them from here on.
    ///
    /// # Errors
    /// The system's.
    pub fn catch() -> io::Result<Self> {
        hear_of_children()?;
        let mut catching = locked(&CATCHING);
        let catching = match &mut *catching {
            Some(catching) => catching,
            none => none.insert(Catching::first()?),
        };
        let note = |&(signal, number): &(Signal, i32)| {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(number, Arc::clone(&flag)).map(|id| (signal, flag, id))
        };
        let noted = catching.caught.iter().map(note).collect::<io::Result<_>>()?;
        catching.launches += 1;
        catching.idle.store(false, Ordering::SeqCst);
        Ok(Self { noted })
    }

    /// A signal that came since last asked.
    pub fn take(&self) -> Option<Signal> {
        self.noted
            .iter()
            .find(|(_, flag, _)| flag.swap(false, Ordering::SeqCst))
            .map(|(signal, ..)| *signal)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut catching = locked(&CATCHING);
        if let Some(Catching { launches, idle, .. }) = catching.as_mut() {
            *launches -= 1;
            idle.store(*launches == 0, Ordering::SeqCst);
        }
        for (_, _, id) in &self.noted {
            signal_hook::low_level::unregister(*id);
        }
    }
}
