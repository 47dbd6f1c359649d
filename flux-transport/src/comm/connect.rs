//! How ranks become a communicator.
//!
//! Invariant: every rank takes the same steps and tells the others what it cannot do, so all fail
//! if one does.

use super::automatic::automatic;
use super::communicator::Communicator;
use super::open::{host, mixed, nccl, nvlink, pcie};
use super::terms::{differences, lineage_of, terms};
use crate::backends::asked;
use crate::bootstrap::control::{Disagreed, Step, agree_at};
use crate::bootstrap::unblock::unblock;
use crate::reason;
use crate::{ConnectError, Options, Select, World};
use flux_core::Rank;
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Longer waits are a mistake, and their ends could not be computed.
const MAX_DEADLINE: Duration = Duration::from_hours(24);

impl Communicator {
    /// Connects all ranks of `world` over a transport ([`Select`](crate::Select)) or with more
    /// [`Options`].
    ///
    /// Threads of a rank connect one after another, in one order on all ranks.
    ///
    /// Between GPUs [`Select::Auto`] proves peer access first. Call
    /// [`probe::serve`](crate::probe::serve) first in `main`, or put the program `flux-probe`
    /// beside this one. The proof then runs in a process of its own, and a driver that crashes or
    /// hangs there ends no rank. Without either a thread of this process proves it.
    ///
    /// # Cancellation
    /// Dropping the future ends its waits, and the other ranks' with
    /// [`ControlError::Aborted`](crate::ControlError::Aborted).
    ///
    /// # Errors
    /// [`ConnectError`], on every rank if on one.
    pub async fn connect(world: &World, options: impl Into<Options>) -> Result<Self, ConnectError> {
        let (world, options) = (world.connecting(), options.into());
        connect_on_thread(world, move |world| connect(world, &options, None)).await
    }

    /// As [`connect`](Self::connect), on this thread.
    ///
    /// # Errors
    /// [`ConnectError`], on every rank if on one.
    pub fn connect_blocking(
        world: &World,
        options: impl Into<Options>,
    ) -> Result<Self, ConnectError> {
        connect(&world.connecting(), &options.into(), None)
    }
}

/// Connects on this thread, as the communicator that `world` [counts](World::connecting); whose
/// successor this is, by its lineage, is said where it is known.
pub(super) fn connect(
    world: &World,
    options: &Options,
    lineage: Option<u32>,
) -> Result<Communicator, ConnectError> {
    let variable = |name| text(std::env::var_os(name));
    let selected = select(options, variable("FLUX_TRANSPORT").as_deref());
    // Set for the ranks of a launch, one of which may well have a world of its own beside.
    let of_ranks = variable("FLUX_NODES").filter(|_| world.size().get() > 1);
    let selected = selected
        .and_then(|select| Ok((select, asked(select, options.nodes, of_ranks.as_deref())?)));
    let offer = selected
        .as_ref()
        .map(|&(select, nodes)| terms(select, &Options { nodes, ..*options }, lineage));
    // A refused deadline cannot bound the step that refuses it.
    let deadline = if options.deadline.is_zero() {
        Options::default().deadline
    } else {
        options.deadline.min(MAX_DEADLINE)
    };
    let deadline = Instant::now() + deadline;
    let answers = agree_at(world.steps(), Step::Connect, &offer, deadline);
    if let Err(Disagreed::Control(_)) = answers {
        world.not_met();
    }
    let (selected, nodes) = selected?;
    let options = &Options { nodes, ..*options };
    let answers: Vec<String> =
        answers?.iter().map(|answer| String::from_utf8_lossy(answer).into_owned()).collect();
    if let Some(values) = differences(&answers) {
        return Err(ConnectError::Disagreement { what: "options", values });
    }
    // A replacement hears of it from the others.
    let world = &answers
        .iter()
        .find_map(|answer| lineage_of(answer))
        .map_or_else(|| world.share(), |lineage| world.of_lineage(lineage));
    let (transport, why) = match selected {
        Select::Host => (host(world, options)?, "asked for".to_owned()),
        Select::NvLink => (nvlink(world, options)?, "asked for".to_owned()),
        Select::Mixed => (mixed(world, options)?, "asked for".to_owned()),
        Select::Nccl => (nccl(world, options)?, "asked for".to_owned()),
        Select::Pcie => (pcie(world, options)?, "asked for".to_owned()),
        Select::Auto => automatic(world, options)?,
    };
    let explanation = format!("{} ({why})", transport.explain());
    tracing::info!(rank = world.rank().get(), "{explanation}");
    let comm = Communicator::new(world, options, transport, explanation);
    // From here on a peer may abort, and every rank hears it.
    world.steps().exchange_at(Step::Memory, &[], Instant::now() + options.deadline)?;
    Ok(comm)
}

/// A variable's value. Invalid UTF-8 counts as set, and is refused by name.
fn text(value: Option<OsString>) -> Option<String> {
    value.map(|value| value.to_string_lossy().into_owned())
}

/// What this rank asks for: the options', or where they leave it open what `FLUX_TRANSPORT` names.
fn select(options: &Options, variable: Option<&str>) -> Result<Select, ConnectError> {
    if options.deadline.is_zero() || options.deadline > MAX_DEADLINE {
        return Err(ConnectError::Deadline { deadline: options.deadline, limit: MAX_DEADLINE });
    }
    match variable {
        Some(name) if options.select == Select::Auto && !name.is_empty() => Ok(name.parse()?),
        _ => Ok(options.select),
    }
}

/// Connects on a thread of its own, since the steps block. Dropping the future aborts them.
async fn connect_on_thread(
    world: World,
    connect: impl FnOnce(&World) -> Result<Communicator, ConnectError> + Send + 'static,
) -> Result<Communicator, ConnectError> {
    let mut wanted = AbortOnDrop(Some(world.share()));
    let connected = on_own_thread(world.rank(), move || connect(&world)).await;
    wanted.0 = None;
    connected
}

/// Ends the steps of a communicator that nobody waits for any more.
struct AbortOnDrop(Option<World>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(world) = &self.0 {
            world.control().abort(world.communicator(), reason::INTERRUPTED);
        }
    }
}

/// Runs on a thread of its own what blocks.
pub(super) async fn on_own_thread(
    rank: Rank,
    connect: impl FnOnce() -> Result<Communicator, ConnectError> + Send + 'static,
) -> Result<Communicator, ConnectError> {
    let thread = unblock(format!("flux-connect-{rank}"), connect).await;
    thread.map_err(|source| ConnectError::Io { what: "starting a thread to connect on", source })?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::{Environment, join};
    use crate::lateness::AMPLE;
    use flux_core::Nodes;
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    /// Two ranks that meet as processes do, in this one.
    fn in_processes(select: Select) -> Vec<Result<String, ConnectError>> {
        meet(select, |path, _| vec![("FLUX_RENDEZVOUS", path.as_os_str().to_owned())])
    }

    /// Two ranks that take themselves for those of two hosts.
    fn on_two_hosts(select: Select) -> Vec<Result<String, ConnectError>> {
        let free = crate::loopback::free_address();
        meet(select, |path, rank| {
            vec![
                ("FLUX_RENDEZVOUS", format!("tcp://{free}").into()),
                ("FLUX_SECRET", "a secret of the tests, long enough".into()),
                ("FLUX_HOST_ID", rank.to_string().into()),
                ("XDG_RUNTIME_DIR", path.as_os_str().to_owned()),
            ]
        })
    }

    /// Two ranks that are told so, in a directory of their own.
    fn meet(
        select: Select,
        told: impl Fn(&Path, u32) -> Vec<(&'static str, OsString)> + Sync,
    ) -> Vec<Result<String, ConnectError>> {
        let directory = tempfile::Builder::new()
            .permissions(PermissionsExt::from_mode(0o700))
            .tempdir()
            .unwrap();
        let (path, told) = (directory.path(), &told);
        let rank = |rank: u32| {
            let mut set = vec![
                ("FLUX_RANK", OsString::from(rank.to_string())),
                ("FLUX_WORLD_SIZE", "2".into()),
                ("FLUX_LOCAL_RANK", rank.to_string().into()),
            ];
            set.extend(told(path, rank));
            let variable = |name: &str| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
            };
            let deadline = Instant::now() + AMPLE;
            let control = join(&Environment::parse(&variable).unwrap(), deadline).unwrap();
            connect(&World::new(rank, control).connecting(), &select.into(), None)
                .map(|comm| comm.explain())
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Whether this machine has GPUs, whose own tests say what ranks take there.
    fn gpus(test: &str) -> bool {
        let there = flux_cuda::available().is_ok();
        if there {
            eprintln!("{test}: skipped, there are GPUs");
        }
        there
    }

    #[test]
    fn processes_without_gpus_share_files_and_are_told_why() {
        for explained in in_processes(Select::Host) {
            let text = explained.unwrap();
            assert!(
                text.starts_with("host: 2 ranks are processes of this machine")
                    && text.ends_with("(asked for)"),
                "{text}"
            );
        }
        if gpus("processes_without_gpus_share_files_and_are_told_why: what auto and nvlink say") {
            return;
        }
        for explained in in_processes(Select::Auto) {
            let text = explained.unwrap();
            assert!(
                text.starts_with("host: ")
                    && text.contains("chosen by auto, as no rank has a GPU: ")
                    && text.contains("driver"),
                "{text}"
            );
        }
        for refused in in_processes(Select::NvLink) {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains("driver"), "{text}");
        }
    }

    #[test]
    fn auto_without_gpus_takes_the_nodes_that_are_asked_for() {
        if gpus("auto_without_gpus_takes_the_nodes_that_are_asked_for") {
            return;
        }
        let options = Options { nodes: Some(2), ..Options::default() };
        let worlds = World::local(4).unwrap();
        std::thread::scope(|scope| {
            for world in &worlds {
                scope.spawn(move || {
                    let comm = connect(world, &options, None).unwrap();
                    assert_eq!(
                        (comm.transport(), comm.nodes()),
                        (crate::TransportKind::Host, Nodes::new(world.size(), 2).unwrap())
                    );
                });
            }
        });
    }

    #[test]
    fn ranks_of_two_hosts_share_no_memory_and_are_two_nodes() {
        for select in [Select::Host, Select::NvLink] {
            for refused in on_two_hosts(select) {
                let text = refused.unwrap_err().to_string();
                assert!(text.contains("different hosts"), "{select}: {text}");
            }
        }
        if gpus("ranks_of_two_hosts_share_no_memory_and_are_two_nodes: what mixed says") {
            return;
        }
        // They are grouped, and only then found to have no devices.
        for refused in on_two_hosts(Select::Mixed) {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains("driver"), "{text}");
        }
        for refused in in_processes(Select::Mixed) {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains("all ranks are of one node"), "{text}");
        }
    }

    /// Two ranks that connect, each as the successor of a lineage where it knows one.
    fn connected(worlds: &[World], lineages: [Option<u32>; 2]) -> Vec<Communicator> {
        std::thread::scope(|scope| {
            let rank = |(world, lineage)| {
                let world = World::connecting(world);
                scope.spawn(move || connect(&world, &Select::Host.into(), lineage).unwrap())
            };
            let ranks: Vec<_> = worlds.iter().zip(lineages).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_have_rebuilt_a_communicator_more_or_less_often_are_of_its_lineage() {
        let lineage =
            |comm: &Communicator| (comm.inner.world.communicator(), comm.inner.world.lineage());
        let old = World::local(2).unwrap();
        connected(&old, [None; 2]);
        let second = connected(&old, [None; 2]);
        assert_eq!(second.iter().map(lineage).collect::<Vec<_>>(), [(1, 1); 2]);
        // The first rank rebuilds it, with a replacement.
        let rebuilt = connected(&World::local(2).unwrap(), [Some(lineage(&second[0]).1), None]);
        assert_eq!(rebuilt.iter().map(lineage).collect::<Vec<_>>(), [(0, 1); 2]);
        // The second has not, and both do.
        let again = connected(
            &World::local(2).unwrap(),
            [Some(lineage(&rebuilt[0]).1), Some(lineage(&second[1]).1)],
        );
        assert_eq!(again.iter().map(lineage).collect::<Vec<_>>(), [(0, 1); 2]);
    }

    #[test]
    fn a_variable_decides_only_where_the_options_do_not() {
        let selected = |select: Select, variable| {
            super::select(&select.into(), variable).map_err(|error| error.to_string())
        };
        assert_eq!(selected(Select::Auto, Some("host")), Ok(Select::Host));
        assert_eq!(selected(Select::NvLink, Some("host")), Ok(Select::NvLink));
        for nothing in [None, Some("")] {
            assert_eq!(selected(Select::Auto, nothing), Ok(Select::Auto));
        }
        let error = selected(Select::Auto, Some("pigeon")).unwrap_err();
        assert!(error.starts_with("FLUX_TRANSPORT: `pigeon`"), "{error}");
        // No text at all is no transport either, and no number of nodes.
        let garbled = || text(Some(OsString::from_vec(b"host\xff".to_vec())));
        let error = selected(Select::Auto, garbled().as_deref()).unwrap_err();
        assert!(error.starts_with("FLUX_TRANSPORT: `host\u{fffd}`"), "{error}");
        let error = asked(Select::Host, None, garbled().as_deref()).unwrap_err().to_string();
        assert!(error.contains("FLUX_NODES = \"host\u{fffd}\""), "{error}");
    }
}
