//! How ranks become a communicator.
//!
//! Invariant: every rank takes the same steps whatever it finds, and tells the others what it cannot do; so if one rank fails, all do.

use super::health::Health;
use super::{Communicator, ConnectError};
use crate::control::agree;
use crate::host::Host;
use crate::nvlink::{Members, NvLink, NvLinkError};
use crate::{Options, Select, Transport, World};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// Longer waits are a mistake, and their ends could not be computed.
const MAX_DEADLINE: Duration = Duration::from_hours(24);

/// Connects on this thread.
pub(super) fn connect(world: &World, options: &Options) -> Result<Communicator, ConnectError> {
    let selected = select(options);
    let offer = selected.as_ref().map(|select| terms(*select, options));
    let deadline = Instant::now() + options.deadline.min(MAX_DEADLINE);
    let answers = agree(world.control(), &offer, deadline);
    let selected = selected?;
    let answers: Vec<String> = answers?.iter().map(|answer| String::from_utf8_lossy(answer).into_owned()).collect();
    if answers.iter().any(|answer| *answer != answers[0]) {
        let values: Vec<String> = answers.iter().enumerate().map(|(rank, answer)| format!("rank {rank}: {answer}")).collect();
        return Err(ConnectError::Disagreement { what: "options", values: values.join("; ") });
    }
    let (transport, why): (Box<dyn Transport>, String) = match selected {
        Select::Host => (Box::new(Host::connect(world, options)?), "asked for".to_owned()),
        Select::NvLink => (Box::new(NvLink::connect(world, options, Members::meet(world, options)?)?), "asked for".to_owned()),
        Select::Auto => match Members::meet(world, options) {
            Ok(members) => {
                let why = "chosen: every rank has a CUDA device of its own that reaches all others".to_owned();
                (Box::new(NvLink::connect(world, options, members)?), why)
            }
            Err(NvLinkError::Control(error)) => return Err(error.into()),
            Err(error) => (Box::new(Host::connect(world, options)?), format!("chosen: {error}")),
        },
    };
    let explanation = format!("{} ({why})", transport.explain());
    tracing::info!(rank = world.rank().get(), "{explanation}");
    let comm = Communicator::new(world, options, Health::new(world.rank(), transport), explanation);
    // From here on a peer may abort, and every rank hears it.
    comm.inner.world.control().barrier(Instant::now() + options.deadline)?;
    Ok(comm)
}

/// What this rank asks for: the options', or where they leave it open what `FLUX_TRANSPORT` names.
fn select(options: &Options) -> Result<Select, ConnectError> {
    if options.deadline.is_zero() || options.deadline > MAX_DEADLINE {
        return Err(ConnectError::Deadline { deadline: options.deadline, limit: MAX_DEADLINE });
    }
    match std::env::var("FLUX_TRANSPORT") {
        Ok(name) if options.select == Select::Auto && !name.is_empty() => Ok(name.parse()?),
        _ => Ok(options.select),
    }
}

/// What all ranks must ask for alike, in words that an error can show.
fn terms(select: Select, options: &Options) -> String {
    let Options { deadline, first_epoch, shared_device, reserve, .. } = options;
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "flux {version}, transport {select}, deadline {deadline:?}, first epoch {first_epoch}, shared device {shared_device}, {reserve:?}"
    )
}

/// Connects on a thread of its own, since bootstrap blocks.
pub(super) async fn connect_apart(world: World, options: Options) -> Result<Communicator, ConnectError> {
    type Outcome = (Option<Result<Communicator, ConnectError>>, Option<Waker>);
    let shared: Arc<Mutex<Outcome>> = Arc::default();
    let for_thread = Arc::clone(&shared);
    std::thread::Builder::new()
        .name(format!("flux-connect-{}", world.rank()))
        .spawn(move || {
            let result = connect(&world, &options);
            drop(world);
            let mut outcome = for_thread.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.0 = Some(result);
            let waker = outcome.1.take();
            drop(outcome);
            if let Some(waker) = waker {
                waker.wake();
            }
        })
        .map_err(|source| ConnectError::Io { what: "starting a thread to connect on", source })?;
    poll_fn(move |context| {
        let mut outcome = shared.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.0.take().map_or_else(
            || {
                outcome.1 = Some(context.waker().clone());
                Poll::Pending
            },
            Poll::Ready,
        )
    })
    .await
}
