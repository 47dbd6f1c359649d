//! Ranks that meet by a rendezvous of the program's own: here each writes a file, and reads those
//! of all. An engine has a channel or a store that does the same.
//!
//! `cargo run -p flux-tp-transport --example rendezvous` starts three ranks as processes.

#![allow(clippy::print_stdout, reason = "an example says what it does")]

use async_trait::async_trait;
use flux_transport::{BootstrapError, Communicator, Rank, Rendezvous, Select, World, WorldSize};
use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

const RANKS: u32 = 3;

/// A folder that all ranks of the program see, and nobody else may enter.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    rank: u32,
}

#[async_trait]
impl Rendezvous for Folder {
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let failed = |error: io::Error| BootstrapError::Rendezvous { source: error.into() };
        let file = |rank: u32| self.path.join(format!("{generation}-{rank}"));
        // Under its name only when it is whole.
        let part = self.path.join(format!("{generation}-{}.part", self.rank));
        std::fs::write(&part, payload).map_err(failed)?;
        std::fs::rename(part, file(self.rank)).map_err(failed)?;
        let mut given = Vec::new();
        for rank in 0..RANKS {
            given.push(whole(&file(rank), deadline).await.map_err(failed)?);
        }
        Ok(given)
    }
}

/// What a file holds once it is there. A program with a runtime awaits its timer or its channel.
async fn whole(path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
    poll_fn(|context| match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
            std::thread::sleep(Duration::from_millis(1));
            context.waker().wake_by_ref();
            Poll::Pending
        }
        read => Poll::Ready(read),
    })
    .await
}

fn rank(rank: u32, path: PathBuf) -> Result<(), Box<dyn Error>> {
    let size = WorldSize::new(RANKS).ok_or("no world size")?;
    let world = World::builder(Rank::new(rank), size)
        .deadline(Duration::from_secs(30))
        .meet_blocking(Arc::new(Folder { path, rank }))?;
    let comm = Communicator::connect_blocking(&world, Select::Host)?;
    let said = comm.exchange(format!("rank {rank}").as_bytes())?;
    let said: Vec<_> = said.iter().map(|said| String::from_utf8_lossy(said)).collect();
    println!("rank {rank} hears {}", said.join(", "));
    Ok(())
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    if let (Some(number), Some(path)) = (arguments.next(), arguments.next()) {
        rank(number.parse()?, path.into())?;
        return Ok(ExitCode::SUCCESS);
    }
    let folder = tempfile::tempdir()?;
    let start = |rank: u32| {
        Command::new(std::env::current_exe()?).arg(rank.to_string()).arg(folder.path()).spawn()
    };
    let mut ranks = (0..RANKS).map(start).collect::<io::Result<Vec<_>>>()?;
    let mut all = true;
    for rank in &mut ranks {
        all &= rank.wait()?.success();
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
