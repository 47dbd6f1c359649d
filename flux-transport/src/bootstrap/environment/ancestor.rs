//! Names the process that started a launch's ranks on this host.
//!
//! Invariant: ranks of one host get the same name whatever shells are between: those inherit the
//! rank's variables, the launcher does not have them.

use std::path::PathBuf;

/// More processes between a rank and its launcher are a loop.
const DEPTH: usize = 64;

/// Names the nearest ancestor without `variable` in its environment: its pid and start time.
pub(super) fn outside(variable: &str) -> String {
    outside_from(rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get()), variable)
}

fn outside_from(mut pid: i32, variable: &str) -> String {
    let mark = format!("{variable}=");
    for _ in 0..DEPTH {
        let Some((parent, start)) = parent_and_start(pid) else { break };
        // Another user's process does not show it; that is no rank of ours.
        let environment = std::fs::read(of(pid, "environ")).unwrap_or_default();
        if !environment.split(|&byte| byte == 0).any(|entry| entry.starts_with(mark.as_bytes())) {
            return format!("{pid} since {start}");
        }
        pid = parent;
    }
    format!("{pid}")
}

fn of(pid: i32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

/// From `/proc/PID/stat`; the program's name before them may contain anything.
fn parent_and_start(pid: i32) -> Option<(i32, u64)> {
    let stat = std::fs::read(of(pid, "stat")).ok()?;
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    // Field 22 of the file; the state was 3, the parent 4.
    Some((parent, fields.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn shells_between_a_rank_and_its_launcher_do_not_count() {
        // This process does not have the variable, so it is the launcher.
        let me = rustix::process::getpid().as_raw_nonzero().get();
        let launcher = format!("{me} since {}", parent_and_start(me).unwrap().1);
        let script = "sh -c 'echo $$; read line; :'; :";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).env("FLUX_TEST_MARK", "1");
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut inner = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut inner).unwrap();
        let inner: i32 = inner.trim().parse().unwrap();
        assert_eq!(parent_and_start(inner).unwrap().0, shell.id().cast_signed());
        for pid in [inner, shell.id().cast_signed(), me] {
            assert_eq!(outside_from(pid, "FLUX_TEST_MARK"), launcher);
        }
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }
}
