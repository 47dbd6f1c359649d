//! How the ranks make sure that they build the same op.
//!
//! Invariant: either all ranks go on, or all leave the build with an error.

use crate::error::{BuildError, Requests};
use crate::planning::Buckets;
use flux_core::Rank;
use flux_transport::internal::control::{Step, shortened};
use flux_transport::{Communicator, TransportError};
use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};

/// Wraps the transport's errors in the build of an op.
pub(crate) fn while_building(op: &str) -> impl Fn(TransportError) -> BuildError {
    move |source| BuildError::Transport { op: op.to_owned(), source }
}

/// Compares the ranks' requests, and returns rank 0's plans; collective. Other ranks need give
/// none.
///
/// # Errors
/// [`BuildError::Disagreement`], the same on every rank.
pub(crate) fn same_request(
    comm: &Communicator,
    op: &str,
    request: &str,
    own: Option<&Buckets>,
) -> Result<Option<Buckets>, BuildError> {
    let payload =
        [request.as_bytes(), &[0], &own.map_or_else(Vec::new, Buckets::to_bytes)].concat();
    let said = comm.exchange_at(Step::Build, &payload).map_err(while_building(op))?;
    let split = |payload: &Vec<u8>| {
        let end = payload.iter().position(|&byte| byte == 0).unwrap_or(payload.len());
        (payload[..end].to_vec(), payload.get(end + 1..).unwrap_or_default().to_vec())
    };
    let (texts, plans): (Vec<_>, Vec<_>) = said.iter().map(split).unzip();
    let requests = group(&texts);
    if requests.0.len() != 1 {
        return Err(BuildError::Disagreement { requests });
    }
    Ok(plans.first().and_then(|plans| Buckets::from_bytes(plans)))
}

/// The number by which ranks compare the ops of their calls: not 0, and the same for equal requests
/// with equal plans. Ops of one request have other plans after a tuning.
///
/// FNV-1a of 32 bits (Fowler, Noll and Vo).
pub(crate) fn number(request: &str, plans: &Buckets) -> u32 {
    then(then(NO_BYTES, request.as_bytes()), &plans.to_bytes()).max(1)
}

/// The number by which ranks compare one call of the op with this number: it has `m` rows, and
/// `empty` calls without rows went before it.
pub(crate) fn call_number(op: u32, m: u32, empty: u32) -> u32 {
    then(then(op, &m.to_le_bytes()), &empty.to_le_bytes()).max(1)
}

/// The hash of no bytes.
const NO_BYTES: u32 = 0x811c_9dc5;

/// A hash with more bytes. Each step is invertible, so equal numbers go on differently with each
/// `m`.
fn then(hash: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// What a rank says at [`Step::Ready`] while it works: no reason has this byte.
const WORKING: &[u8] = &[0];

/// Does this rank's work, which may take longer than a deadline where kernels are compiled. Says so
/// to the other ranks meanwhile, which wait in [`all_ready`], or work as long.
///
/// # Errors
/// [`BuildError::Transport`] where a peer is lost meanwhile.
pub(crate) fn working<V>(
    comm: &Communicator,
    op: &str,
    work: impl FnOnce() -> V,
) -> Result<V, BuildError> {
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        let announce = move || -> Result<(), BuildError> {
            // A rank that says something in each third of a deadline is late for none.
            while ended.recv_timeout(comm.deadline() / 3) == Err(RecvTimeoutError::Timeout) {
                comm.exchange_at(Step::Ready, WORKING).map_err(while_building(op))?;
            }
            Ok(())
        };
        // Where no thread can be had, peers wait for this rank for one deadline.
        let announcer = std::thread::Builder::new().spawn_scoped(scope, announce).ok();
        let value = work();
        drop(done);
        announcer
            .map_or(Ok(()), |thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))?;
        Ok(value)
    })
}

/// Returns `mine` where every rank can go on; collective. Waits as long as a rank is
/// [`working`].
///
/// # Errors
/// This rank's own error, or [`BuildError::Peer`] with that of the first rank that has one.
pub(crate) fn all_ready<V>(
    comm: &Communicator,
    op: &str,
    mine: Result<V, BuildError>,
) -> Result<V, BuildError> {
    let reason = mine.as_ref().err().map_or_else(String::new, |error| shortened(error.to_string()));
    let reasons = loop {
        let said = comm.exchange_at(Step::Ready, reason.as_bytes()).map_err(while_building(op));
        if !said.as_ref().is_ok_and(|said| said.iter().any(|reason| reason == WORKING)) {
            break said;
        }
    };
    let value = mine?;
    match (0..).map(Rank::new).zip(&reasons?).find(|(_, reason)| !reason.is_empty()) {
        Some((rank, reason)) => {
            Err(BuildError::Peer { rank, reason: String::from_utf8_lossy(reason).into_owned() })
        }
        None => Ok(value),
    }
}

fn group(requests: &[Vec<u8>]) -> Requests {
    let mut groups: Vec<(Vec<Rank>, String)> = Vec::new();
    for (rank, request) in (0..).map(Rank::new).zip(requests) {
        let request = String::from_utf8_lossy(request);
        match groups.iter_mut().find(|(_, known)| *known == request) {
            Some((ranks, _)) => ranks.push(rank),
            None => groups.push((vec![rank], request.into_owned())),
        }
    }
    Requests(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::Choice;
    use flux_core::plan::PlanOrigin;
    use flux_transport::{Options, Select, World};
    use std::time::Duration;

    #[test]
    fn hashes_are_those_of_the_standard() {
        assert_eq!(
            ["", "a", "foobar"].map(|text| then(NO_BYTES, text.as_bytes())),
            [0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968]
        );
    }

    #[test]
    fn ops_of_one_request_with_other_plans_have_other_numbers() {
        let plans = |tile: &str| {
            let choice = Choice { plan: tile.parse().unwrap(), sms: 8, origin: PlanOrigin::Model };
            Buckets::one(8, choice)
        };
        let [one, other] = ["tile=128x128x64", "tile=128x256x64"].map(plans);
        assert_eq!(number("ag_gemm", &one), number("ag_gemm", &one.clone()));
        assert_ne!(number("ag_gemm", &one), number("ag_gemm", &other));
        assert_ne!(number("ag_gemm", &one), number("gemm_rs", &one));
    }

    #[test]
    fn calls_differ_by_rows_and_by_the_empty_calls_before() {
        let op = then(NO_BYTES, b"a");
        let calls: std::collections::BTreeSet<u32> =
            (1..2000).flat_map(|m| (0..20).map(move |empty| call_number(op, m, empty))).collect();
        assert_eq!(calls.len(), 1999 * 20);
        assert!(!calls.contains(&0) && !calls.contains(&call_number(then(NO_BYTES, b"b"), 7, 0)));
    }

    /// As where one host's cache is cold: its compiler takes several deadlines.
    #[test]
    fn nobody_times_out_while_a_rank_compiles_slowly() {
        const DEADLINE: Duration = Duration::from_secs(2);
        let build = |world: World| {
            let mut options = Options::from(Select::Host);
            options.deadline = DEADLINE;
            let comm = Communicator::connect_blocking(&world, options).unwrap();
            let slow = comm.rank().get() == 1;
            let compiled = working(&comm, "op", || {
                std::thread::sleep(if slow { DEADLINE * 2 } else { Duration::ZERO });
                comm.rank()
            });
            all_ready(&comm, "op", compiled).unwrap()
        };
        std::thread::scope(|scope| {
            let worlds = World::local(3).unwrap().into_iter();
            let ranks: Vec<_> = worlds.map(|world| scope.spawn(move || build(world))).collect();
            for (rank, built) in ranks.into_iter().enumerate() {
                assert_eq!(built.join().unwrap().index(), rank);
            }
        });
    }

    #[test]
    fn disagreeing_ranks_are_named_with_what_they_asked_for() {
        let requests =
            group(&[b"m=8".to_vec(), b"m=8".to_vec(), b"m=16".to_vec(), b"m=8".to_vec()]);
        assert_eq!(
            BuildError::Disagreement { requests }.to_string(),
            "the ranks build different ops: ranks 0, 1, 3 `m=8`; rank 2 `m=16`; \
             build the same ops with the same options, in the same order, on every rank"
        );
    }
}
