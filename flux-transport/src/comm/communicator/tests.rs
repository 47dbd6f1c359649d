//! What becomes of calls that fail, and of an abort that comes, while the workspace grows; and who
//! hears of ranks in other ops.

use super::*;
use crate::bootstrap::control::{GaveUp, mask_of};
use crate::comm::mock::MockTransport;
use crate::{CallState, Stream};
use crate::{Fault, Select};
use flux_core::layout::{ABORT_OFFSET, FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

fn word(address: u64) -> u32 {
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
    // SAFETY: a word of a communicator that lives until the end of the test, and is only accessed
    // as a whole.
    unsafe { AtomicU32::from_ptr(at) }.load(Ordering::Acquire)
}

#[test]
fn an_abort_while_the_workspace_grows_ends_the_growth_and_all_waits() {
    let size = WorkspaceSize { half_bytes: 1 << 12, ..WorkspaceSize::default() };
    let connect = |world: World| Communicator::connect_blocking(&world, Select::Host).unwrap();
    std::thread::scope(|scope| {
        let [aborts, grows] = <[World; 2]>::try_from(World::local(2).unwrap()).unwrap();
        let grown = scope.spawn(move || {
            let comm = connect(grows);
            let refused = comm.reserve(size).unwrap_err();
            assert!(
                matches!(
                    refused,
                    TransportError::Broken { fault: Fault::Aborted { reason: 7, .. } }
                ),
                "{refused}"
            );
            assert_eq!(word(comm.workspace().fault + ABORT_OFFSET), 7);
            assert!(matches!(comm.begin(Stream::Host), Err(TransportError::Broken { .. })));
        });
        let comm = connect(aborts);
        let steps = comm.inner.world.steps();
        // The first step of `reserve`, so that the peer waits in the second.
        agree_at(steps, Step::Reserve, &Ok::<_, TransportError>(encode(size)), comm.until())
            .unwrap();
        comm.abort(7);
        grown.join().unwrap();
    });
}

#[test]
fn what_drained_calls_have_failed_with_is_found_before_the_workspace_goes_that_tells_of_it() {
    let (drained, replaced) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let told = {
        let (drained, replaced) = (Arc::clone(&drained), Arc::clone(&replaced));
        move || drained.load(Ordering::Relaxed) && !replaced.load(Ordering::Relaxed)
    };
    let record = FaultRecord {
        state: 1,
        code: fault::DISAGREED,
        wait: fault::CALL,
        ..FaultRecord::default()
    };
    let transport = MockTransport {
        read_fault: Box::new(move || told().then_some(record)),
        drain: Box::new(move || drained.store(true, Ordering::Relaxed)),
        reserve: Box::new(move || replaced.store(true, Ordering::Relaxed)),
        ..MockTransport::default()
    };
    let comm = Communicator::new(
        &World::single(),
        &Select::Host.into(),
        Box::new(transport),
        String::new(),
    );
    assert_eq!(comm.status(), Ok(()));
    comm.reserve(WorkspaceSize { half_bytes: 1, ..WorkspaceSize::default() }).unwrap();
    assert!(matches!(comm.status(), Err(Fault::Disagreed { .. })), "{:?}", comm.status());
}

/// Where messages carry what ranks say, not every rank has heard the one that differs when another
/// ends them.
#[test]
fn who_finds_a_rank_in_another_op_tells_the_others_whose_waits_end() {
    let [finds, hears] = <[World; 2]>::try_from(World::local(2).unwrap()).unwrap();
    let aborted = Arc::new(AtomicU32::new(0));
    let record = FaultRecord {
        state: 1,
        code: fault::DISAGREED,
        wait: fault::CALL,
        rank: 0,
        peer: 1,
        epoch: 5,
        ..FaultRecord::default()
    };
    let with = |world: &World, transport| {
        Communicator::new(world, &Select::Host.into(), Box::new(transport), String::new())
    };
    let finds = with(
        &finds,
        MockTransport { read_fault: Box::new(move || Some(record)), ..MockTransport::default() },
    );
    let word = Arc::clone(&aborted);
    let hears = with(
        &hears,
        MockTransport {
            set_abort: Box::new(move |reason| word.store(reason, Ordering::Relaxed)),
            ..MockTransport::default()
        },
    );
    assert_eq!(hears.status(), Ok(()));
    let found = finds.status();
    assert!(matches!(found, Err(Fault::Disagreed { .. })), "{found:?}");
    assert_eq!((hears.status(), aborted.load(Ordering::Relaxed)), (found, reason::IN_ANOTHER_OP));
}

/// A kernel, or a watching thread, may read a peer's word before the host hears of the loss that
/// the peer gave up for.
#[test]
fn a_loss_that_is_heard_of_by_a_peers_word_is_told_as_that_loss() {
    let [lost, _, hears] = <[World; 3]>::try_from(World::local(3).unwrap()).unwrap();
    let abort = reason::peer_lost(lost.rank());
    let record = FaultRecord {
        state: 1,
        code: fault::ABORTED,
        rank: 1,
        peer: 1,
        epoch: 5,
        abort,
        ..FaultRecord::default()
    };
    let transport =
        MockTransport { read_fault: Box::new(move || Some(record)), ..MockTransport::default() };
    let hears = Communicator::new(&hears, &Select::Host.into(), Box::new(transport), String::new());
    let told = Fault::PeerLost { rank: lost.rank() };
    assert_eq!((hears.status(), &hears.failure().unwrap().fault), (Err(told.clone()), &told));
    assert!(
        matches!(hears.begin(Stream::Host), Err(TransportError::Broken { fault }) if fault == told)
    );
}

fn ranks<const N: usize>() -> [World; N] {
    World::local(u32::try_from(N).unwrap()).unwrap().try_into().unwrap()
}

fn with(world: &World, record: Option<FaultRecord>) -> Communicator {
    let transport =
        MockTransport { read_fault: Box::new(move || record), ..MockTransport::default() };
    Communicator::new(world, &Select::Host.into(), Box::new(transport), String::new())
}

fn waited_for(rank: &World, peer: &World) -> FaultRecord {
    let (rank, peer) = (rank.rank().get(), peer.rank().get());
    FaultRecord {
        state: 1,
        code: fault::TIMEOUT,
        wait: fault::SIGNAL,
        rank,
        peer,
        epoch: 5,
        expected: 5,
        ..FaultRecord::default()
    }
}

fn give_up(world: &World, late: &World, record: FaultRecord) {
    world.control().give_up(&GaveUp { communicator: 0, late: mask_of([late.rank()]), record });
}

/// Its kernel's wait for somebody may have passed its deadline while its process was stopped.
#[test]
fn a_rank_that_was_given_up_says_so_and_blames_nobody() {
    let [stopped, waits, healthy] = ranks();
    let runs_on = with(&stopped, Some(waited_for(&stopped, &healthy)));
    let blamed = with(&healthy, None);
    give_up(&waits, &stopped, waited_for(&waits, &stopped));
    assert_eq!(runs_on.status(), Err(Fault::Aborted { rank: waits.rank(), reason: reason::LATE }));
    assert_eq!(
        (blamed.inner.health.given_up_by(), blamed.inner.health.given_up()),
        (None, mask_of([stopped.rank()]))
    );
}

/// A rank's word in memory says that its wait has failed; who is late comes after it.
#[test]
fn what_another_ranks_wait_led_to_is_told_as_that_ranks_fault() {
    let [hears, waits, late] = ranks();
    let word =
        FaultRecord { code: fault::ABORTED, abort: reason::TIMED_OUT, ..waited_for(&waits, &late) };
    let comm = with(&hears, Some(word));
    // The word is what is found first.
    assert!(matches!(comm.inner.health.status(), Err(Fault::Aborted { .. })));
    give_up(&waits, &late, waited_for(&waits, &late));
    assert_eq!(
        comm.status(),
        Err(Fault::from_record(&waited_for(&waits, &late), vec![late.rank()]))
    );
    // Where nothing is heard it stays what it is.
    let [alone, peer, late] = ranks();
    let word =
        FaultRecord { code: fault::ABORTED, abort: reason::TIMED_OUT, ..waited_for(&peer, &late) };
    assert_eq!(
        with(&alone, Some(word)).status(),
        Err(Fault::Aborted { rank: peer.rank(), reason: reason::TIMED_OUT })
    );
}

/// Where hosts have launched ahead: a device hangs whose host answers. Whoever's wait fails first
/// does not know yet that the one it waited for waits itself.
#[test]
fn a_rank_that_waits_for_a_hung_device_is_not_named_by_those_that_wait_for_it() {
    for ahead in [0, 10, 60] {
        let [first, second, hung, third] = ranks();
        let found = Arc::new(AtomicBool::new(false));
        let (record, is_found) = (waited_for(&second, &hung), Arc::clone(&found));
        let late = MockTransport {
            read_fault: Box::new(move || is_found.load(Ordering::Relaxed).then_some(record)),
            ..MockTransport::default()
        };
        let waits = [
            with(&first, Some(waited_for(&first, &second))),
            with(&third, Some(waited_for(&third, &hung))),
        ];
        let (second, device) = (
            Communicator::new(&second, &Select::Host.into(), Box::new(late), String::new()),
            with(&hung, None),
        );
        for comm in waits.iter().chain([&second, &device]) {
            comm.inner
                .flight
                .note(comm.inner.flight.begin(Some(Epoch::new(9)), None, 0), CallState::Launched);
        }
        let named =
            |fault: Fault| if let Fault::Timeout { late, .. } = fault { late } else { Vec::new() };
        std::thread::scope(|scope| {
            let mut told = waits.each_ref().map(|comm| scope.spawn(|| comm.status())).map(Some);
            std::thread::sleep(Duration::from_millis(ahead));
            found.store(true, Ordering::Relaxed);
            assert_eq!(named(second.status().unwrap_err()), [hung.rank()]);
            for told in told.iter_mut().filter_map(Option::take) {
                assert_eq!(
                    named(told.join().unwrap().unwrap_err()),
                    [hung.rank()],
                    "{ahead} ms ahead"
                );
            }
        });
        assert!(
            device.inner.health.given_up_by().is_some()
                && second.inner.health.given_up_by().is_none()
        );
    }
}

/// It runs on before any other has asked, and its own wait has failed by then.
#[test]
fn a_rank_whose_process_was_paused_names_itself_and_is_named_by_all() {
    let [paused, waits, healthy] = ranks();
    let named =
        |fault: Fault| if let Fault::Timeout { late, .. } = fault { late } else { Vec::new() };
    let (record, paused_in) = (waited_for(&paused, &healthy), Some(Epoch::new(5)));
    let transport = MockTransport {
        read_fault: Box::new(move || Some(record)),
        paused_in: Box::new(move || paused_in),
        ..MockTransport::default()
    };
    let runs_on =
        Communicator::new(&paused, &Select::Host.into(), Box::new(transport), String::new());
    // The one waits for the paused rank's messages, whose call it knows, and the other for that
    // one.
    let peers = [
        with(&waits, Some(waited_for(&waits, &paused))),
        with(&healthy, Some(waited_for(&healthy, &waits))),
    ];
    for comm in [&runs_on].into_iter().chain(&peers) {
        let call = comm.inner.flight.begin(Some(Epoch::new(5)), None, 0);
        comm.inner.flight.note(call, CallState::Launched);
    }
    assert_eq!(named(runs_on.status().unwrap_err()), [paused.rank()]);
    for comm in &peers {
        assert_eq!(named(comm.status().unwrap_err()), [paused.rank()]);
        assert_eq!(comm.inner.health.given_up_by(), None);
    }
    let refused = runs_on.rebuild_blocking(crate::Rebuild::Survivors);
    assert!(
        matches!(refused, Err(crate::ConnectError::GivenUp { by }) if by == paused.rank()),
        "{refused:?}"
    );
    let told = peers[0].failure().unwrap().to_string();
    assert!(told.contains("was paused in call 5"), "{told}");
}

/// Its own waits may have failed for what it was given up for.
#[test]
fn a_rank_that_was_given_up_tells_of_no_wait() {
    let [stopped, waits] = ranks();
    let comm = with(&stopped, Some(waited_for(&stopped, &waits)));
    assert!(comm.inner.health.record_to_tell().is_some());
    give_up(&waits, &stopped, waited_for(&waits, &stopped));
    assert_eq!(comm.inner.health.record_to_tell(), None);
}

/// Whoever hears of an abort says so in its own words in memory, where others look.
#[test]
fn an_abort_that_is_passed_on_is_that_of_the_rank_that_asked_for_it() {
    let [passes, aborts, hears] = ranks();
    let word = FaultRecord { code: fault::ABORTED, abort: 7, ..waited_for(&passes, &passes) };
    let (aborter, hearer) = (with(&aborts, None), with(&hears, Some(word)));
    aborter.abort(7);
    let told = Err(Fault::Aborted { rank: aborts.rank(), reason: 7 });
    assert_eq!(hearer.status(), told);
    // The word is seen first.
    let [passes, aborts, hears] = ranks();
    let word = FaultRecord { code: fault::ABORTED, abort: 7, ..waited_for(&passes, &passes) };
    let (aborter, hearer) = (with(&aborts, None), with(&hears, Some(word)));
    assert!(hearer.is_broken());
    aborter.abort(7);
    assert_eq!(hearer.status(), told);
    // Where no other rank reports it.
    let [passes, hears] = ranks();
    let word = FaultRecord { code: fault::ABORTED, abort: 7, ..waited_for(&passes, &passes) };
    assert_eq!(
        with(&hears, Some(word)).status(),
        Err(Fault::Aborted { rank: passes.rank(), reason: 7 })
    );
}

/// NCCL fails at its peers where one rank gives it up; where none says why, it is told as it is.
#[test]
fn an_error_of_nccl_is_told_where_nothing_else_is_heard() {
    let [fails, hears] = ranks();
    let own =
        FaultRecord { code: fault::ABORTED, abort: reason::NCCL, ..waited_for(&fails, &hears) };
    let (broken, peer) = (with(&fails, Some(own)), with(&hears, None));
    // Refused a call for it, and no cause itself.
    broken.abort(7);
    assert_eq!(peer.status(), Ok(()));
    let told = Err(Fault::Aborted { rank: fails.rank(), reason: reason::NCCL });
    assert_eq!((broken.status(), peer.status()), (told.clone(), told));
    // The word of another tells nobody anew.
    let [fails, hears, third] = ranks();
    let word =
        FaultRecord { code: fault::ABORTED, abort: reason::NCCL, ..waited_for(&fails, &hears) };
    let (broken, peer) = (with(&hears, Some(word)), with(&third, None));
    assert_eq!(broken.status(), Err(Fault::Aborted { rank: fails.rank(), reason: reason::NCCL }));
    assert_eq!(peer.status(), Ok(()));
}

#[test]
fn another_op_is_told_whoever_has_given_up_who_found_it() {
    let [finds, waits, hears] = ranks();
    let record =
        FaultRecord { code: fault::DISAGREED, wait: fault::CALL, ..waited_for(&finds, &hears) };
    let finder = with(&finds, Some(record));
    give_up(&waits, &finds, waited_for(&waits, &finds));
    // A rank that learns of it now, and of nothing before.
    let peer = with(&hears, None);
    let told = finder.status();
    assert!(matches!(told, Err(Fault::Disagreed { .. })), "{told:?}");
    assert_eq!(peer.status(), told);
}

#[test]
fn a_rank_that_gives_up_after_a_loss_is_not_taken_for_its_cause() {
    let [lost, gives_up, hears] = ranks();
    let word = FaultRecord {
        code: fault::ABORTED,
        abort: reason::peer_lost(lost.rank()),
        ..waited_for(&hears, &lost)
    };
    let (broken, peer) = (with(&gives_up, Some(word)), with(&hears, None));
    broken.abort(7);
    assert_eq!(
        (broken.status(), peer.status()),
        (Err(Fault::PeerLost { rank: lost.rank() }), Ok(()))
    );
    // By itself it is.
    let [gives_up, hears] = ranks();
    let (works, peer) = (with(&gives_up, None), with(&hears, None));
    works.abort(7);
    let aborted = Err(Fault::Aborted { rank: gives_up.rank(), reason: 7 });
    assert_eq!((works.status(), peer.status()), (aborted.clone(), aborted));
}
