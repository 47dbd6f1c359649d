//! Where the lines go that ranks print.
//!
//! Invariant: a line reaches each of its places in one write, whatever other ranks print meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use flux_core::Rank;

use super::error::LaunchError;

/// How long lines of ranks that have ended are waited for: a process that left its rank's group may
/// hold the pipe.
const LAST_LINES: Duration = Duration::from_secs(1);

/// What becomes of the ranks' standard output and error.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    /// Whether lines begin with the rank.
    pub(super) prefix: bool,
    /// The folder with a file for each rank.
    pub(super) logs: Option<PathBuf>,
}

/// The threads that pass lines on; each holds a sender until its pipe ends.
pub(super) struct Passing {
    held: Sender<()>,
    ended: Receiver<()>,
}

impl Passing {
    pub(super) fn new() -> Self {
        let (held, ended) = channel();
        Self { held, ended }
    }

    /// Returns when all lines are passed on, or after [`LAST_LINES`].
    pub(super) fn finish(self) {
        let Self { held, ended } = self;
        drop(held);
        let until = Instant::now() + LAST_LINES;
        while ended.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }
}

impl Output {
    /// The file of a rank, made anew.
    fn log(&self, rank: Rank) -> Result<Option<File>, LaunchError> {
        let Some(folder) = &self.logs else { return Ok(None) };
        let path = folder.join(format!("rank-{rank}.log"));
        let made = std::fs::create_dir_all(folder).and_then(|()| {
            OpenOptions::new().create(true).append(true).open(&path).and_then(|file| {
                file.set_len(0)?;
                Ok(file)
            })
        });
        made.map(Some).map_err(|source| LaunchError::Log { path, source })
    }

    /// Says where a rank prints, before it starts. Returns its log, where lines pass through here.
    pub(super) fn redirect(
        &self,
        rank: Rank,
        command: &mut Command,
    ) -> Result<Option<File>, LaunchError> {
        let log = self.log(rank)?;
        if self.prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            return Ok(log);
        }
        if let (Some(file), Some(folder)) = (log, &self.logs) {
            let failed = |source| LaunchError::Log { path: folder.clone(), source };
            command.stdout(file.try_clone().map_err(failed)?).stderr(file);
        }
        Ok(None)
    }

    /// Passes on what a rank prints into pipes.
    pub(super) fn pass(
        child: &mut Child,
        rank: Rank,
        log: Option<&File>,
        passing: &Passing,
    ) -> io::Result<()> {
        let start = |name, from: Box<dyn Read + Send>, to: fn(&[u8])| {
            let (held, log) = (passing.held.clone(), log.map(File::try_clone).transpose()?);
            std::thread::Builder::new().name(format!("flux-{name}-{rank}")).spawn(move || {
                let _held = held;
                pass_lines(from, rank, log, to);
            })?;
            io::Result::Ok(())
        };
        // A reader that has gone changes nothing about the ranks.
        if let Some(out) = child.stdout.take() {
            start("out", Box::new(out), |line| drop(io::stdout().lock().write_all(line)))?;
        }
        if let Some(err) = child.stderr.take() {
            start("err", Box::new(err), |line| drop(io::stderr().lock().write_all(line)))?;
        }
        Ok(())
    }
}

fn pass_lines(from: impl Read, rank: Rank, mut log: Option<File>, to: fn(&[u8])) {
    let (mut from, prefix) = (BufReader::new(from), format!("[{rank}] "));
    loop {
        let mut line = prefix.clone().into_bytes();
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if let Some(log) = &mut log
            && let Err(error) = log.write_all(&line[prefix.len()..])
        {
            tracing::warn!(%rank, %error, "a line of a rank is not in its log");
        }
        to(&line);
    }
}
