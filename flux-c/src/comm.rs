//! Communicators.

use crate::error::{Error, flux_status, guard};
use crate::handle::{Kind, Structure, copy_text, given, here, structure, text, write};
use flux_ops::binding::{Handles, OfProcess};
use flux_ops::{Rank, WorldSize};
use flux_transport::{
    Communicator, ConnectError, Options, Rebuild, Secret, Select, World, WorldError,
};
use std::ffi::{c_char, c_void};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Shortest time for the ranks to come, which load their program first.
const START: Duration = Duration::from_mins(1);

/// One rank's membership of a group of ranks that compute together.
#[derive(Debug)]
pub struct flux_comm {
    _opaque: [u8; 0],
}

/// How to connect. Zeros are the defaults. All ranks give the same but for the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flux_comm_options {
    /// sizeof(flux_comm_options).
    pub size: usize,
    /// "host", "nvlink", "pcie", "nccl", "mixed" or "auto": what FLUX_TRANSPORT names, else the
    /// best that works. NULL for "auto".
    pub transport: *const c_char,
    /// Seconds that a wait for a peer may take, at most 24 hours; 0 for 30.
    pub timeout: f64,
    /// Most bytes of the workspace that the ranks share: an op that needs more is refused. 0 for no
    /// limit.
    pub max_workspace: u64,
    /// SMs that calls leave to other kernels.
    pub sm_margin: u32,
    /// 0: the CUDA device is the rank's number on its host. 1: it is `device`.
    pub has_device: u32,
    /// The number of the CUDA device in this process.
    pub device: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: numbers and a pointer.
unsafe impl Structure for flux_comm_options {
    const NAME: &'static str = "options";
}

/// Who takes part in a communicator that is rebuilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_rebuild {
    /// The ranks that are neither lost nor given up, renumbered in order. On one host only.
    FLUX_REBUILD_SURVIVORS = 1,
    /// All ranks under their numbers: a new process with the same variables replaces each lost one.
    FLUX_REBUILD_WHOLE = 2,
}

/// What ops are created with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpDefaults {
    pub(crate) max_workspace: Option<u64>,
    pub(crate) sm_margin: u32,
}

/// A communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) comm: Communicator,
    pub(crate) defaults: OpDefaults,
    /// How many there are; `None` once it is being destroyed.
    ops: Mutex<Option<usize>>,
    /// The launcher's, after the communicator.
    _world: Option<Arc<World>>,
}

static COMMS: Kind<Comm> = Kind { name: "communicator", tag: 5, values: Handles::new() };

/// Keeps a communicator for an op.
#[derive(Debug)]
pub(crate) struct InUse(Arc<OfProcess<Comm>>);

impl InUse {
    /// # Errors
    /// The communicator is destroyed, or of another process.
    pub(crate) fn of(handle: *const flux_comm) -> Result<Self, Error> {
        let comm = COMMS.get(handle)?;
        let mut ops = here(&comm)?.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let count = ops.as_mut().ok_or_else(|| {
            Error::handle("the communicator has been destroyed: create another one")
        })?;
        *count += 1;
        drop(ops);
        Ok(Self(comm))
    }

    pub(crate) fn comm(&self) -> Result<&Comm, Error> {
        here(&self.0)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Ok(comm) = self.0.get() {
            let mut ops = comm.ops.lock().unwrap_or_else(PoisonError::into_inner);
            *ops = ops.map(|count| count.saturating_sub(1));
        }
    }
}

fn keep(comm: Communicator, defaults: OpDefaults, world: Option<Arc<World>>) -> *mut flux_comm {
    COMMS.keep(Comm { comm, defaults, ops: Mutex::new(Some(0)), _world: world })
}

/// Runs with a communicator.
fn with(comm: *const flux_comm, run: impl FnOnce(&Comm) -> Result<(), Error>) -> flux_status {
    guard(|| run(here(&*COMMS.get(comm)?)?))
}

/// Reads the options; NULL is the defaults.
///
/// # Safety
/// As [`structure`].
unsafe fn read_options(from: *const flux_comm_options) -> Result<(Options, OpDefaults), Error> {
    if from.is_null() {
        return Ok((Options::default(), OpDefaults { max_workspace: None, sm_margin: 0 }));
    }
    // SAFETY: as the caller vouches.
    let given = unsafe { structure(from) }?;
    let mut options = Options::default();
    if !given.transport.is_null() {
        // SAFETY: as the caller vouches.
        let name = unsafe { text("options.transport", given.transport) }?;
        options.select = name
            .parse::<Select>()
            .map_err(|error| Error::argument(format!("options.transport: {error}")))?;
    }
    if given.timeout != 0.0 {
        let wrong = |error| {
            Error::argument(format!(
                "options.timeout = {}: {error}: give seconds above 0, or 0 for 30",
                given.timeout
            ))
        };
        options.deadline = Duration::try_from_secs_f64(given.timeout).map_err(wrong)?;
    }
    options.device = match given.has_device {
        0 => None,
        1 => Some(given.device),
        other => return Err(Error::argument(format!("options.has_device = {other}: give 0 or 1"))),
    };
    if given.reserved != 0 {
        return Err(Error::argument(format!("options.reserved = {}: give 0", given.reserved)));
    }
    let defaults = OpDefaults {
        max_workspace: Some(given.max_workspace).filter(|&bytes| bytes > 0),
        sm_margin: given.sm_margin,
    };
    Ok((options, defaults))
}

/// The launcher's world, joined once for all communicators that live, by process.
static LAUNCHED: Mutex<(u32, Weak<World>)> = Mutex::new((0, Weak::new()));

fn launched(deadline: Duration) -> Result<Arc<World>, Error> {
    let mut launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some(world) = launched.1.upgrade().filter(|_| launched.0 == process) {
        return Ok(world);
    }
    let world = Arc::new(World::from_env_with(deadline).map_err(of_world)?);
    *launched = (process, Arc::downgrade(&world));
    Ok(world)
}

/// The error of joining the launcher's world, by the names of this interface.
fn of_world(error: WorldError) -> Error {
    match error {
        WorldError::NoLauncher => Error::new(
            flux_status::FLUX_ERROR_CONNECT,
            "no launcher's variables are set, or FLUX_LAUNCHER is none: start the program with a \
             launcher (torchrun, srun, mpirun or `flux-bench launch`), or call flux_comm_init_all \
             or flux_comm_init_rank"
                .to_owned(),
        ),
        error => error.into(),
    }
}

/// The error of a rebuild, by the names of this interface.
fn of_rebuild(error: ConnectError) -> Error {
    match error {
        ConnectError::AcrossHosts { hosts } => Error::new(
            flux_status::FLUX_ERROR_CONNECT,
            format!(
                "the ranks are on {hosts} hosts, and survivors make a group of their own on one \
                 host only: use FLUX_REBUILD_WHOLE, with a new process in the place of each lost \
                 one"
            ),
        ),
        error => error.into(),
    }
}

/// Bytes of a secret.
const SECRET_BYTES: RangeInclusive<usize> = 16..=4096;

fn world_of(size: u32) -> Result<WorldSize, Error> {
    WorldSize::new(size).ok_or_else(|| {
        Error::argument(format!("world_size = {size}: a communicator has 1 to 16 ranks"))
    })
}

/// Connects the ranks of a launcher: torchrun, srun, mpirun or `flux-bench launch`. Collective:
/// waits for the other processes, at least a minute.
///
/// options   NULL for the defaults
/// comm      gets the communicator, or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_from_env(
    options: *const flux_comm_options,
    comm: *mut *mut flux_comm,
) -> flux_status {
    guard(|| {
        given("comm", comm)?;
        // SAFETY: the caller's place for a handle.
        unsafe { comm.write(std::ptr::null_mut()) };
        // SAFETY: as the header asks.
        let (options, defaults) = unsafe { read_options(options) }?;
        let world = launched(options.deadline.max(START))?;
        let connected = Communicator::connect_blocking(&world, options)?;
        // SAFETY: the caller's place for a handle, which was found not NULL.
        unsafe { comm.write(keep(connected, defaults, Some(world))) };
        Ok(())
    })
}

/// Connects processes that know their ranks. Collective: waits for the others, at least a minute.
///
/// rank        this rank, from 0.
/// world_size  number of ranks, at most 16.
/// meeting     "HOST:PORT", an address and a free port of rank 0's host; or, of ranks on one host,
///             an existing directory: absolute path, mode 0700, of this user, of no other launch.
/// secret      with an address: 16 to 4096 bytes that all ranks know and nobody else; else NULL.
/// secret_size bytes of it.
/// options     NULL for the defaults
/// comm        gets the communicator, or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_init_rank(
    rank: u32,
    world_size: u32,
    meeting: *const c_char,
    secret: *const c_void,
    secret_size: usize,
    options: *const flux_comm_options,
    comm: *mut *mut flux_comm,
) -> flux_status {
    guard(|| {
        given("comm", comm)?;
        // SAFETY: the caller's place for a handle.
        unsafe { comm.write(std::ptr::null_mut()) };
        // SAFETY: as the header asks.
        let (options, defaults) = unsafe { read_options(options) }?;
        // SAFETY: as the header asks.
        let meeting = unsafe { text("meeting", meeting) }?;
        let size = world_of(world_size)?;
        let builder = World::builder(Rank::new(rank), size).deadline(options.deadline.max(START));
        let world = if Path::new(meeting).is_absolute() {
            if !secret.is_null() {
                return Err(Error::argument(
                    "secret is given with a directory: ranks on one host need none, so give NULL",
                ));
            }
            builder.on_host(meeting)?
        } else {
            given("secret", secret)?;
            if !SECRET_BYTES.contains(&secret_size) {
                return Err(Error::argument(format!(
                    "secret_size = {secret_size}: give a secret of {} to {} bytes",
                    SECRET_BYTES.start(),
                    SECRET_BYTES.end()
                )));
            }
            // SAFETY: the caller's bytes, as many as it says, which no secret has more of.
            let bytes = unsafe { std::slice::from_raw_parts(secret.cast::<u8>(), secret_size) };
            builder.across_hosts(meeting, Secret::new(bytes).map_err(ConnectError::from)?)?
        };
        let connected = Communicator::connect_blocking(&world, options)?;
        // SAFETY: the caller's place for a handle, which was found not NULL.
        unsafe { comm.write(keep(connected, defaults, None)) };
        Ok(())
    })
}

/// Makes all ranks in this process, each for a thread of its own. On GPUs rank `r` has device `r`.
///
/// world_size  number of ranks, at most 16; nothing is written where it is another
/// options     NULL for the defaults; without a device
/// comms       gets `world_size` communicators by rank, or as many NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_init_all(
    world_size: u32,
    options: *const flux_comm_options,
    comms: *mut *mut flux_comm,
) -> flux_status {
    guard(|| {
        given("comms", comms)?;
        let size = world_of(world_size)?;
        // SAFETY: the caller has room for `world_size` handles, and that is a world size.
        let put = |rank: usize, comm| unsafe { comms.add(rank).write(comm) };
        (0..size.index()).for_each(|rank| put(rank, std::ptr::null_mut()));
        // SAFETY: as the header asks.
        let (options, defaults) = unsafe { read_options(options) }?;
        if options.device.is_some() {
            return Err(Error::argument(
                "options.has_device = 1: each rank has a device of its own, so give 0",
            ));
        }
        let worlds = World::local(world_size)?;
        let connected: Vec<_> = std::thread::scope(|scope| {
            let connect = |world: World| move || Communicator::connect_blocking(&world, options);
            let ranks: Vec<_> =
                worlds.into_iter().map(|world| scope.spawn(connect(world))).collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        // Others say only that a peer could not.
        let cause = connected.iter().position(
            |comm| matches!(comm, Err(error) if !matches!(error, ConnectError::PeerFailed { .. })),
        );
        let mut connected = connected;
        if let Some(Err(error)) = cause.map(|rank| connected.swap_remove(rank)) {
            return Err(error.into());
        }
        let connected = connected.into_iter().collect::<Result<Vec<_>, _>>()?;
        connected
            .into_iter()
            .enumerate()
            .for_each(|(rank, comm)| put(rank, keep(comm, defaults, None)));
        Ok(())
    })
}

/// Leaves the group, when this rank's calls have ended. Destroy its ops before, and CUDA graphs
/// with calls of them. Peers finish the calls that this rank has made; their later ones fail.
#[unsafe(no_mangle)]
pub extern "C" fn flux_comm_destroy(comm: *mut flux_comm) -> flux_status {
    guard(|| {
        let kept = COMMS.get(comm)?;
        let mut ops = here(&kept)?.ops.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = ops.filter(|&count| count > 0) {
            return Err(Error::handle(format!(
                "the communicator has {count} op(s): destroy them first"
            )));
        }
        *ops = None;
        drop(ops);
        COMMS.remove(comm).map(drop)
    })
}

/// Makes a new communicator of a broken one. Collective among those that go on. The old one stays
/// broken: destroy its ops and it, and create the ops anew.
///
/// who       a flux_rebuild, the same on all of them
/// rebuilt   gets the new communicator, or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_rebuild(
    comm: *const flux_comm,
    who: i32,
    rebuilt: *mut *mut flux_comm,
) -> flux_status {
    with(comm, |comm| {
        given("rebuilt", rebuilt)?;
        // SAFETY: the caller's place for a handle.
        unsafe { rebuilt.write(std::ptr::null_mut()) };
        let who = match who {
            1 => Rebuild::Survivors,
            2 => Rebuild::Whole,
            other => return Err(Error::argument(format!("who = {other} is no flux_rebuild"))),
        };
        let made = comm.comm.rebuild_blocking(who).map_err(of_rebuild)?;
        // SAFETY: the caller's place for a handle, which was found not NULL.
        unsafe { rebuilt.write(keep(made, comm.defaults, None)) };
        Ok(())
    })
}

/// Who this rank is. Any of the places may be NULL.
///
/// rank        gets its number
/// world_size  gets the number of ranks
/// device      gets the number of its CUDA device in this process; -1 where it works on the host
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_place(
    comm: *const flux_comm,
    rank: *mut u32,
    world_size: *mut u32,
    device: *mut i32,
) -> flux_status {
    with(comm, |Comm { comm, .. }| {
        let ordinal = comm.device().info().map_or(-1, |info| info.ordinal.cast_signed());
        // SAFETY: the caller's places, or NULL.
        unsafe {
            write(rank, comm.rank().get());
            write(world_size, comm.world_size().get());
            write(device, ordinal);
        }
        Ok(())
    })
}

/// Whether calls may be captured in CUDA graphs: 1 or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_graphs(comm: *const flux_comm, graphs: *mut i32) -> flux_status {
    with(comm, |Comm { comm, .. }| {
        given("graphs", graphs)?;
        // SAFETY: the caller's place.
        unsafe { graphs.write(i32::from(comm.capabilities().graphs)) };
        Ok(())
    })
}

/// Bytes that this rank's communicator and its ops hold. Any of the places may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_memory(
    comm: *const flux_comm,
    device: *mut u64,
    pinned: *mut u64,
    host: *mut u64,
) -> flux_status {
    with(comm, |Comm { comm, .. }| {
        let memory = comm.memory();
        let held = memory.workspace.plus(memory.besides_workspace());
        // SAFETY: the caller's places, or NULL.
        unsafe {
            write(device, held.device);
            write(pinned, held.pinned);
            write(host, held.host);
        }
        Ok(())
    })
}

/// The transport and why it was chosen, for people.
///
/// text      gets the text and a NUL, cut to `capacity` bytes; NULL where that is 0
/// needed    gets the bytes of all of it with the NUL; or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_comm_explain(
    comm: *const flux_comm,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> flux_status {
    // SAFETY: as the header asks.
    with(comm, |Comm { comm, .. }| unsafe { copy_text(&comm.explain(), text, capacity, needed) })
}

/// Returns the fault that broke the communicator, or FLUX_OK. Waits for no call. The first to find
/// a fault asks the peers what they do, for some 0.25 s at most. On CUDA, a result may be read when
/// its stream has come past the call and this then returns FLUX_OK.
#[unsafe(no_mangle)]
pub extern "C" fn flux_comm_check(comm: *const flux_comm) -> flux_status {
    with(comm, |Comm { comm, .. }| comm.failure().map_or(Ok(()), |failure| Err(failure.into())))
}

/// Returns when every rank has come here, on the host only. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn flux_comm_barrier(comm: *const flux_comm) -> flux_status {
    with(comm, |Comm { comm, .. }| Ok(comm.barrier()?))
}

/// Ends every wait of the communicator on all ranks, and breaks it: for a rank that cannot make a
/// call that its peers are in, and to end a call that another thread of this rank waits in, for
/// example after SIGINT. Those calls return FLUX_ERROR_ABORTED. Any thread may call it at any time
/// while the handle lives, but no signal handler: it takes locks and sends messages.
///
/// reason    a number of the caller's
#[unsafe(no_mangle)]
pub extern "C" fn flux_comm_abort(comm: *const flux_comm, reason: u32) -> flux_status {
    with(comm, |Comm { comm, .. }| {
        comm.abort(reason);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::flux_last_error_message;
    use std::ffi::CStr;

    #[test]
    fn a_program_without_a_launcher_or_on_several_hosts_is_told_what_c_has() {
        let said = |error: fn() -> Error| {
            assert_eq!(guard(|| Err(error())), flux_status::FLUX_ERROR_CONNECT);
            // SAFETY: the message of this thread, which makes no call meanwhile.
            unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap().to_owned()
        };
        let alone = said(|| of_world(WorldError::NoLauncher));
        assert!(
            alone.ends_with("or call flux_comm_init_all or flux_comm_init_rank")
                && !alone.contains("World::"),
            "{alone}"
        );
        let apart = said(|| of_rebuild(ConnectError::AcrossHosts { hosts: 2 }));
        assert!(
            apart.contains("are on 2 hosts") && apart.contains("use FLUX_REBUILD_WHOLE"),
            "{apart}"
        );
    }
}
