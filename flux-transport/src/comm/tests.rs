//! What becomes of calls that fail, and of an abort that comes, while the workspace grows; and who hears of ranks in other ops.

use super::fake::Fake;
use super::*;
use crate::{Fault, Select};
use flux_core::layout::{ABORT_OFFSET, FaultRecord, fault};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

fn word(address: u64) -> u32 {
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
    // SAFETY: a word of a communicator that lives until the end of the test, and is only accessed as a whole.
    unsafe { AtomicU32::from_ptr(at) }.load(Ordering::Acquire)
}

#[test]
fn an_abort_while_the_workspace_grows_ends_the_waits_on_the_new_one() {
    let size = WorkspaceSize { half_bytes: 1 << 12, ..WorkspaceSize::default() };
    let connect = |world: World| Communicator::connect_blocking(&world, Select::Host).unwrap();
    std::thread::scope(|scope| {
        let [aborts, grows] = <[World; 2]>::try_from(World::local(2).unwrap()).unwrap();
        scope.spawn(move || {
            let comm = connect(grows);
            comm.reserve(size).unwrap();
            assert_eq!(comm.workspace_size(), size);
            assert_eq!(word(comm.workspace().fault + ABORT_OFFSET), 7);
            assert!(matches!(comm.begin(Stream::Host), Err(TransportError::Broken { .. })));
            comm.barrier().unwrap();
        });
        let comm = connect(aborts);
        let (world, transport) = (&comm.inner.world, comm.inner.health.transport());
        let steps = world.steps();
        // The steps of `reserve`, so that the peer, which has found nothing wrong, cannot have grown when it hears of the abort.
        agree_at(steps, Step::Reserve, &Ok::<_, TransportError>(encode(size)), comm.until()).unwrap();
        comm.abort_peers(7);
        agree(steps, &Ok::<_, TransportError>([]), comm.until()).unwrap();
        transport.reserve(size, steps, comm.until()).unwrap();
        comm.barrier().unwrap();
    });
}

#[test]
fn what_drained_calls_have_failed_with_is_found_before_the_workspace_goes_that_tells_of_it() {
    let (drained, replaced) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let told = {
        let (drained, replaced) = (Arc::clone(&drained), Arc::clone(&replaced));
        move || drained.load(Ordering::Relaxed) && !replaced.load(Ordering::Relaxed)
    };
    let record = FaultRecord { state: 1, code: fault::DISAGREED, wait: fault::CALL, ..FaultRecord::default() };
    let transport = Fake {
        read_fault: Box::new(move || told().then_some(record)),
        drain: Box::new(move || drained.store(true, Ordering::Relaxed)),
        reserve: Box::new(move || replaced.store(true, Ordering::Relaxed)),
        ..Fake::default()
    };
    let comm = Communicator::new(&World::single(), &Select::Host.into(), Box::new(transport), String::new());
    assert_eq!(comm.status(), Ok(()));
    comm.reserve(WorkspaceSize { half_bytes: 1, ..WorkspaceSize::default() }).unwrap();
    assert!(matches!(comm.status(), Err(Fault::Disagreed { .. })), "{:?}", comm.status());
}

/// Where messages carry what ranks say, not every rank has heard the one that differs when another ends them.
#[test]
fn who_finds_a_rank_in_another_op_tells_the_others_whose_waits_end() {
    let [finds, hears] = <[World; 2]>::try_from(World::local(2).unwrap()).unwrap();
    let aborted = Arc::new(AtomicU32::new(0));
    let record = FaultRecord { state: 1, code: fault::DISAGREED, wait: fault::CALL, rank: 0, peer: 1, epoch: 5, ..FaultRecord::default() };
    let with = |world: &World, transport| Communicator::new(world, &Select::Host.into(), Box::new(transport), String::new());
    let finds = with(&finds, Fake { read_fault: Box::new(move || Some(record)), ..Fake::default() });
    let word = Arc::clone(&aborted);
    let hears = with(&hears, Fake { set_abort: Box::new(move |reason| word.store(reason, Ordering::Relaxed)), ..Fake::default() });
    assert_eq!(hears.status(), Ok(()));
    let found = finds.status();
    assert!(matches!(found, Err(Fault::Disagreed { .. })), "{found:?}");
    assert_eq!((hears.status(), aborted.load(Ordering::Relaxed)), (found, reason::IN_ANOTHER_OP));
}

/// A kernel, or a watching thread, may read a peer's word before the host hears of the loss that the peer gave up for.
#[test]
fn a_loss_that_is_heard_of_by_a_peers_word_is_told_as_that_loss() {
    let [lost, _, hears] = <[World; 3]>::try_from(World::local(3).unwrap()).unwrap();
    let abort = reason::peer_lost(lost.rank());
    let record = FaultRecord { state: 1, code: fault::ABORTED, rank: 1, peer: 1, epoch: 5, abort, ..FaultRecord::default() };
    let transport = Fake { read_fault: Box::new(move || Some(record)), ..Fake::default() };
    let hears = Communicator::new(&hears, &Select::Host.into(), Box::new(transport), String::new());
    let told = Fault::PeerLost { rank: lost.rank() };
    assert_eq!((hears.status(), &hears.failure().unwrap().fault), (Err(told.clone()), &told));
    assert!(matches!(hears.begin(Stream::Host), Err(TransportError::Broken { fault }) if fault == told));
}
