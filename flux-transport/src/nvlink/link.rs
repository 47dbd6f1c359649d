//! How the ranks meet on the host: all that the collective steps need of the control plane.
//!
//! Invariant: both calls are collective and end by a deadline; messages and descriptors arrive whole or the call fails.

use super::error::NvLinkError;
use std::os::fd::OwnedFd;

/// The control plane, as seen by one rank.
pub(crate) trait Link {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn world(&self) -> u32;

    /// Every rank's bytes, in rank order.
    fn exchange(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, NvLinkError>;

    /// Hands entry `p` to rank `p`, and returns in entry `p` what rank `p` handed to this one. Ranks of one process hand each other nothing.
    fn pass_descriptors(&self, mine: Vec<Option<OwnedFd>>) -> Result<Vec<Option<OwnedFd>>, NvLinkError>;
}

/// Ranks that are threads of a test.
#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::sync::{Arc, Barrier, Mutex};

    pub(in super::super) struct Threads {
        rank: u32,
        board: Arc<(Mutex<Vec<Vec<u8>>>, Barrier)>,
    }

    /// Runs `body` on `world` threads that can meet, and returns the results by rank.
    pub(in super::super) fn run<R: Send>(world: u32, body: impl Fn(&dyn Link) -> R + Sync) -> Vec<R> {
        let board = Arc::new((Mutex::new(vec![Vec::new(); world as usize]), Barrier::new(world as usize)));
        std::thread::scope(|scope| {
            let spawn = |rank| {
                let (board, body) = (Arc::clone(&board), &body);
                scope.spawn(move || body(&Threads { rank, board }))
            };
            let threads: Vec<_> = (0..world).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    impl Link for Threads {
        fn rank(&self) -> u32 {
            self.rank
        }

        fn world(&self) -> u32 {
            u32::try_from(self.board.0.lock().unwrap().len()).unwrap()
        }

        fn exchange(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, NvLinkError> {
            let (board, barrier) = &*self.board;
            board.lock().unwrap()[self.rank as usize] = mine.to_vec();
            barrier.wait();
            let all = board.lock().unwrap().clone();
            barrier.wait();
            Ok(all)
        }

        fn pass_descriptors(&self, mine: Vec<Option<OwnedFd>>) -> Result<Vec<Option<OwnedFd>>, NvLinkError> {
            assert!(mine.iter().all(Option::is_none));
            Ok(mine)
        }
    }
}
