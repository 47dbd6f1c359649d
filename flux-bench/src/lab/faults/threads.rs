//! What the threads of a process do, as the system reports it.
//!
//! Invariant: reading waits for nothing, and what cannot be read is left out.

use std::path::Path;

/// Frames of the system's stack that are shown.
const FRAMES: usize = 6;

/// A line for each thread of process `pid`, in the order of their numbers.
pub(super) fn of(pid: u32) -> Vec<String> {
    let folder = Path::new("/proc").join(pid.to_string()).join("task");
    let mut tasks: Vec<u32> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    tasks.sort_unstable();
    tasks.iter().map(|task| describe(*task, &folder.join(task.to_string()))).collect()
}

fn describe(task: u32, folder: &Path) -> String {
    let read = |name: &str| {
        std::fs::read_to_string(folder.join(name)).unwrap_or_default().trim().to_owned()
    };
    let (stat, call, stack) = (read("stat"), read("syscall"), read("stack"));
    let mut words = vec![format!("thread {task} {}", read("comm"))];
    words.extend(
        state(&stat).map(|(state, ticks)| format!("state {state}, {ticks} ticks of CPU time")),
    );
    words.extend(
        Some(read("wchan"))
            .filter(|name| !matches!(&**name, "" | "0"))
            .map(|name| format!("waits in {name}")),
    );
    words
        .extend(call.split_ascii_whitespace().next().map(|number| format!("system call {number}")));
    let frames: Vec<&str> = stack
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(1))
        .take(FRAMES)
        .collect();
    words.extend((!frames.is_empty()).then(|| format!("stack {}", frames.join(" < "))));
    words.join(", ")
}

/// State and processor time of a line of `stat`, whose second field is a name in brackets.
fn state(stat: &str) -> Option<(&str, u64)> {
    let mut fields = stat.rsplit_once(") ")?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // Fields 14 and 15 of the line, of which the state is the third.
    let ticks: Vec<u64> = fields.skip(10).take(2).filter_map(|field| field.parse().ok()).collect();
    (ticks.len() == 2).then(|| (state, ticks.iter().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_is_told_from_one_that_runs() {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let waits = std::thread::Builder::new()
            .name("flux-test-waits".to_owned())
            .spawn(move || wait.recv())
            .unwrap();
        let line = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            of(std::process::id())
                .into_iter()
                .find(|line| line.contains("flux-test-waits, state S, "))
        });
        assert!(line.is_some(), "{:?}", of(std::process::id()));
        drop(end);
        assert!(waits.join().unwrap().is_err());
        assert_eq!(of(u32::MAX), Vec::<String>::new(), "no such process");
    }

    #[test]
    fn a_name_of_any_characters_is_no_state() {
        let stat = "7 (a) R 1 2) S 1 7 7 0 -1 4194304 100 0 0 0 25 17 0 0 20 0";
        assert_eq!(state(stat), Some(("S", 42)));
        assert_eq!(state("7 (cut) S 1"), None);
    }
}
