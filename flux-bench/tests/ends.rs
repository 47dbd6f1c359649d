//! The end of a process that a driver's exit handler would crash.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]
#![allow(clippy::print_stdout, reason = "what is printed before the end is what is looked at")]

use flux_bench::give_up;
use flux_core::Rank;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

const ROLE: &str = "FLUX_TEST_ROLE";

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> i32;
}

extern "C" fn crash() {
    std::process::abort();
}

/// The entry of the processes that the test starts.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
#[expect(clippy::exit, reason = "the end that is to be told from ours")]
fn as_the_role_says() {
    let role = std::env::var_os(ROLE).expect("a role");
    // SAFETY: a function of this program, which takes nothing and returns nothing.
    assert_eq!(unsafe { atexit(crash) }, 0);
    // Unlike `print!`, past the capture of tests; and without a line's end, so that it waits in the
    // buffer.
    write!(std::io::stdout(), "half a line").unwrap();
    if role == "exits" {
        std::process::exit(1);
    }
    let error = |why: &'static str| anyhow::anyhow!(why).context("round 3");
    let before = Duration::from_millis(60);
    for (turn, rank) in (1..).zip([4, 6, 7]) {
        std::thread::spawn(move || {
            std::thread::sleep(before * turn);
            give_up(
                Rank::new(rank),
                &error(if rank == 6 { "it is gone" } else { "signal 5 did not come" }),
            )
        });
    }
    give_up(Rank::new(1), &error("signal 5 did not come"))
}

#[test]
fn a_rank_that_gives_up_ends_with_its_error_and_not_in_an_exit_handler() {
    let run = |role: &str| {
        let words = ["--ignored", "--exact", "as_the_role_says", "--nocapture"];
        Command::new(std::env::current_exe().unwrap()).args(words).env(ROLE, role).output().unwrap()
    };
    assert_eq!(
        run("exits").status.signal(),
        Some(6),
        "the handler crashes an end that runs handlers"
    );
    let done = run("gives up");
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    let said: Vec<&str> =
        said.lines().filter_map(|line| line.strip_prefix("flux-bench: ")).collect();
    let first = ["rank 1: round 3: signal 5 did not come", "rank 6: round 3: it is gone"];
    assert_eq!(said, [first[0], first[1], "ranks 4 and 7: the same as rank 1"]);
    assert!(String::from_utf8_lossy(&done.stdout).ends_with("half a line"), "{done:?}");
}
