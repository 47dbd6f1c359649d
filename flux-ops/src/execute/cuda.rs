//! The fused kernel, on the communicator's CUDA device.
//!
//! Invariant: a call only enqueues: it allocates nothing and waits for nothing, so it may be
//! captured in a graph.

use super::pace::{SPREAD_PERCENT, in_flight_limit, pace, with_a_tile};
use super::{Hands, Push, carried, label};
use crate::error::{BuildError, CallError};
use crate::fused::Operands;
use crate::tensor::{Location, View};
use crate::timeline::{TimedItem, Timeline, TimelineError};
use cudarc::driver::sys;
use flux_core::OpKind;
use flux_core::program::route::Route;
use flux_core::program::{Lent, Round, Schedule, Sending, TileProgram};
use flux_kernels::cuda::{DeviceProgram, Kernel, LaunchArgs, Matrix, Pace, Part, TraceBuffer, launch, loaded};
use flux_kernels::nvrtc::Arch;
use flux_kernels::{Activation, Element, Origin, Variant};
use flux_transport::internal::cuda::CudaDevice;
use flux_transport::{Call, Carry, Communicator, Exchange, Mover, Source, Stream, TransportError, TransportKind};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The compute capability that the kernels are compiled for.
const COMPUTE: (u32, u32) = (9, 0);

/// A kernel with a program on the device.
#[derive(Debug)]
pub(crate) struct CudaExecutor {
    comm: Communicator,
    device: CudaDevice,
    kernel: Arc<Kernel>,
    // Freed only where the device can be waited for.
    program: ManuallyDrop<DeviceProgram>,
    trace: ManuallyDrop<Option<TraceBuffer>>,
    push_by_kernel: bool,
    // What messages carry, where the transport has no other mover.
    rounds: Option<Vec<Round>>,
    sending: Sending,
    // What copy engines carry through the host, where they do.
    route: Option<Route>,
    // Whether the kernel scatters rows to memory of the host itself.
    scatters: bool,
    // By which ranks tell which op a call is of.
    number: u32,
    workers: u32,
    // CTAs on the multiprocessors that messages have, and which items they take before and after.
    lent: (u32, Lent),
    pace: Pace,
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Freeing waits for the device: for calls that may fail as long as their deadline says, for
        // those that have failed perhaps for ever. A device that has failed itself runs nothing any
        // more.
        let failed = !self.device.is_given_up() && self.comm.is_broken();
        if failed && !matches!(self.comm.drain(), Ok(()) | Err(TransportError::Cuda(_))) {
            self.device.give_up("an op's calls that had failed did not end");
        }
        if self.device.is_given_up() {
            return;
        }
        // SAFETY: dropped once, here, and not used after.
        unsafe {
            ManuallyDrop::drop(&mut self.trace);
            ManuallyDrop::drop(&mut self.program);
        }
    }
}

impl CudaExecutor {
    pub(super) fn prepare(
        comm: &Communicator,
        ordinal: u32,
        (program, number): (TileProgram, u32),
        route: Option<Route>,
        (schedule, sending): (&Schedule, Sending),
        hands: Hands,
    ) -> Result<Self, BuildError> {
        let (rounds, left) = match comm.capabilities().mover {
            Mover::Messages { channels } => {
                let rows = program.problem.op() == OpKind::AllGatherGemm;
                let suits = sending.suits(program.problem.op(), schedule) || program.problem.world().peers() == 0;
                if !suits || sending == Sending::Before && comm.transport() == TransportKind::Mixed {
                    return Err(BuildError::NotBefore { op: program.problem.op(), transport: comm.transport() });
                }
                let no_messages = || BuildError::NoMessages { transport: comm.transport(), schedule: *schedule };
                let rounds = program.rounds().ok_or_else(no_messages)?;
                // Where rows are passed on to mates, in the order in which they come.
                let rounds = if program.nodes.are_mixed() { rounds } else { sending.ordered(rounds, rows) };
                let beside = channels.beside(sending, program.problem.op(), &rounds);
                (Some(rounds), beside)
            }
            _ => (None, 0),
        };
        let device = CudaDevice::open(ordinal)?;
        let compute = device.info().compute;
        if compute != COMPUTE {
            return Err(BuildError::Compute { found: compute, needed: COMPUTE });
        }
        let _current = device.enter()?;
        let variant = Variant::of(&program)?;
        let kernel = kernel(if hands.trace { variant.traced() } else { variant })?;
        // What brings the chunks needs its own while the CTAs wait for them.
        let sms = kernel.multiprocessors().saturating_sub(if program.problem.world().peers() > 0 { left } else { 0 }).max(1);
        if let Some(value) = hands.workers.filter(|value| !(1..=sms).contains(value)) {
            return Err(BuildError::Workers { value, max: sms, place: Location::Cuda(ordinal) });
        }
        let workers = with_a_tile(&program, hands.workers.unwrap_or(sms));
        // Not where messages may take all that there are; and a time line is one of workers that
        // take all items in turn.
        let fits = left > 0 && workers.saturating_add(left) <= kernel.multiprocessors();
        let lends = fits && sending != Sending::Before && !program.nodes.are_mixed() && !hands.trace;
        let lent = if lends { schedule.lent.within(&program) } else { Lent::NONE };
        // What is stored for messages, and for the way through the host, goes to this device's
        // memory; with several ranks in a node most does not.
        let local = route.is_some() || rounds.is_some() && !program.nodes.are_mixed();
        let scatters = route.is_none() && carried(comm);
        let spread = hands.spread.unwrap_or(if local { 0 } else { SPREAD_PERCENT });
        let in_flight_limit = if scatters { in_flight_limit(&program, workers) } else { 0 };
        let pace = Pace { in_flight_limit, ..pace(&program, workers, spread) };
        let mut program = program;
        // Of rows that are carried the kernel keeps the own ones for itself, where tiles span
        // shards.
        let keeps = route.is_some() || rounds.is_some() && !program.nodes.are_mixed();
        if keeps {
            let own = program.rank.get();
            program.transfers.retain(|transfer| transfer.dest == own);
        }
        let push_by_kernel = match hands.push {
            // The transport does, beside the messages.
            _ if rounds.is_some() && sending == Sending::Before => false,
            _ if keeps => !program.transfers.is_empty(),
            _ if rounds.is_some() || scatters => false,
            // The copy to the own rank is one within the device, which the driver may do by a
            // kernel, and this one holds the multiprocessors.
            _ if program.flattened => true,
            Push::Auto => !program.is_for_copy_engines(),
            Push::Kernel => true,
            Push::CopyEngine => false,
        };
        let trace = hands.trace.then(|| TraceBuffer::new(program.items.len(), workers)).transpose()?;
        if rounds.is_some() && sending == Sending::Before {
            program = program.signalling_lenders_alone();
        }
        let program = ManuallyDrop::new(DeviceProgram::upload(program, &kernel)?);
        Ok(Self {
            comm: comm.clone(),
            kernel,
            program,
            trace: ManuallyDrop::new(trace),
            push_by_kernel,
            rounds,
            sending,
            route,
            scatters,
            number,
            workers,
            lent: (left, lent),
            pace,
            device,
        })
    }

    pub(super) fn run<T: Element>(
        &self,
        comm: &Communicator,
        operands: &Operands,
        activation: Activation,
        stream: Stream,
    ) -> Result<(), CallError> {
        let wrong_stream = || TransportError::WrongStream { stream, device: comm.device() };
        let raw_stream = stream.raw().ok_or_else(wrong_stream)?;
        let _current = self.device.enter().map_err(TransportError::from)?;
        for (operand, view) in operands.named() {
            self.check_claim(operand, view)?;
        }
        let mut call = comm.begin_as(stream, Some(label(&self.program.program().problem)))?;
        let enqueued = self.enqueue::<T>(&mut call, operands, activation, raw_stream);
        super::end(comm, call, enqueued)
    }

    /// Puts the kernel of a call that has begun on its stream, and beside it what moves its data.
    fn enqueue<T: Element>(
        &self,
        call: &mut Call<'_>,
        operands: &Operands,
        activation: Activation,
        raw_stream: usize,
    ) -> Result<(), CallError> {
        let program = self.program.program();
        let carried = self.rounds.is_some() || self.route.is_some() || self.scatters;
        let by_kernel = self.push_by_kernel || !carried && !call.copy_engine_usable();
        let carry = self.route.as_ref().map(|route| Carry {
            x: operands.x.address,
            row_stride: operands.x.row_bytes::<T>(),
            route,
            op: self.number,
        });
        let exchange =
            self.rounds.as_ref().map(|rounds| super::exchange_of::<T>(&operands.x, (program, self.number), rounds, self.sending));
        if let Some(exchange) = &exchange {
            // SAFETY: as below; the program was agreed on when the op was built, and what the
            // kernel stores it announces by its signals.
            unsafe { call.exchange(exchange) }?;
        } else if self.scatters {
            call.scatter(self.number)?;
        } else if carry.is_none() && !by_kernel {
            // SAFETY: the view borrows `x`, which is memory of this device; that it stays untouched
            // until the stream has come past the call is what the view's maker promised, or what
            // cudarc orders with the view's end.
            unsafe { call.push(&super::push_of::<T>(&operands.x, program)) }?;
        }
        let matrix = |view: &View| Matrix { address: view.address, row_bytes: view.row_bytes::<T>() };
        let await_pushed = call.pushes();
        let heard = call.heard();
        call.hand_over();
        let memory = call.memory();
        let data = self.route.as_ref().map(|route| route.data(&memory.data));
        let args = LaunchArgs {
            x: matrix(&operands.x),
            w: matrix(&operands.w),
            y: matrix(&operands.y),
            bias: operands.bias.map_or(0, |bias| bias.address),
            activation,
            data: data.as_ref().map_or(&memory.data, |data| &data[..memory.data.len()]),
            pads: &memory.pads,
            scatter_buffer: memory.scattered.unwrap_or(memory.data[program.rank.index()]),
            peer_op_hashes: heard.map_or(0, |heard| heard.words),
            control: memory.control,
            fault: memory.fault,
            half_stride: memory.size.half_stride(),
            // Where no peer's pad is reached, or only through the host, the transport alone tells,
            // or what messages bring; where ranks of several nodes say it, more than the op.
            op_hash: if let Some(heard) = heard {
                heard.said
            } else if self.route.is_some() || self.scatters || (self.rounds.is_some() && !program.nodes.are_mixed()) {
                0
            } else {
                self.number
            },
            deadline_ns: memory.deadline_ns,
            await_pushed,
            workers: self.workers,
            part: Part::Whole,
            push: by_kernel,
            pace: self.pace,
            trace: self.trace.as_ref(),
            stream: raw_stream,
        };
        // SAFETY: the operands were checked against the problem and are held as above; the program
        // is as it was built; the workspace is the communicator's, covers this program since the op
        // was built, and stays while the call lives and, on the device, until it is drained. That
        // all ranks enqueue the same is agreed.
        let launch_of = |args: LaunchArgs<'_>| unsafe { launch(&self.kernel, &self.program, &args) }.map_err(CallError::Launch);
        let launch = |part| launch_of(LaunchArgs { part, ..args });
        let Launches { first, workers, last } = self.launches(call);
        let lend = |lent: Option<(Part, usize)>| {
            lent.map_or(Ok(()), |(part, stream)| launch_of(LaunchArgs { part, workers: self.lent.0, push: false, stream, ..args }))
        };
        if let Some(exchange) = exchange.filter(is_stored) {
            let in_parts = self.sending == Sending::Before;
            lend(first)?;
            launch(if in_parts { Part::Tiles } else { workers })?;
            // SAFETY: as above, of the same exchange.
            unsafe { call.exchange_stored(&exchange) }?;
            lend(last)?;
            return if in_parts { launch(Part::Folds) } else { Ok(()) };
        }
        launch(workers)?;
        lend(last)?;
        // After the launch: what is enqueued takes its time, and the kernel has the own shard to
        // begin with.
        match carry {
            // SAFETY: as for the push above.
            Some(carry) => Ok(unsafe { call.carry(&carry) }?),
            None => Ok(()),
        }
    }

    /// The launches of a call that has begun: what is lent, with the stream for it, and what the
    /// workers walk.
    fn launches(&self, call: &Call<'_>) -> Launches {
        let (ctas, Lent { first, last }) = self.lent;
        let stream = if first + last > 0 { call.beside().and_then(Stream::raw) } else { None };
        let Some(stream) = stream else { return Launches { first: None, workers: Part::Whole, last: None } };
        let items = self.program.program().items.len() as u32;
        let all = self.workers + ctas * (u32::from(first > 0) + u32::from(last > 0));
        let among = |first, count, number| Part::Among { first, count, number, all };
        // Those before and those after are one behind the other.
        let lent = |from, count| (count > 0).then(|| (among(from, count, self.workers), stream));
        Launches { first: lent(0, first), workers: among(first, items - first - last, 0), last: lent(items - last, last) }
    }

    pub(super) fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        let trace = self.trace.as_ref().ok_or(TimelineError::NotTraced)?;
        let stream = stream.raw().ok_or(TimelineError::WrongStream)?;
        let _current = self.device.enter()?;
        let stamps = trace.read(stream)?;
        if stamps.workers.iter().any(|worker| worker.entered == 0) {
            return Err(TimelineError::NoCall);
        }
        let program = self.program.program();
        let items = program.items.iter().zip(stamps.items).map(|(&item, times)| TimedItem { item, times }).collect();
        Ok(Timeline { rank: program.rank, items, workers: stamps.workers })
    }

    /// Asks the driver about memory whose location is only claimed.
    fn check_claim(&self, operand: &'static str, view: &View) -> Result<(), CallError> {
        if !view.claimed {
            return Ok(());
        }
        let mut ordinal = -1i32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: the attribute is an `int`, and `ordinal` is a place for one; any address may be
        // asked about.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, view.address) };
        match u32::try_from(ordinal) {
            Ok(ordinal) if code == sys::CUresult::CUDA_SUCCESS => match (Location::Cuda(ordinal), Location::Cuda(self.device.ordinal())) {
                (found, expected) if found == expected => Ok(()),
                (found, expected) => Err(CallError::Location { operand, expected, found }),
            },
            _ => Err(CallError::NotDeviceMemory { operand, address: view.address, code: code as i32 }),
        }
    }

    pub(super) fn explain(&self) -> String {
        let Pace { push_gap_ns, send_gap_ns, in_flight_limit } = self.pace;
        let carried = format!(", NCCL carries the chunks: {}", self.sending);
        let by_turns = format!(", which scatter rows to memory of the host, {in_flight_limit} at once, and fold them from there");
        let mover = match self.push_by_kernel {
            _ if self.rounds.is_some() && self.program.program().nodes.are_mixed() => {
                ", NCCL carries the chunks that cross nodes, copy engines pass rows on"
            }
            _ if self.rounds.is_some() => &carried,
            _ if self.route.is_some() => ", copy engines carry what goes to others through the host",
            _ if self.scatters && in_flight_limit > 0 => &by_turns,
            _ if self.scatters => ", which scatter rows to memory of the host and fold them from there",
            _ if self.program.program().transfers.is_empty() => "",
            true => ", which push the shard",
            false => ", copy engines push the shard (the CTAs once a call was captured)",
        };
        let gaps = match self.program.program().problem.op() {
            OpKind::AllGatherGemm if self.rounds.is_some() => 0,
            OpKind::AllGatherGemm => push_gap_ns,
            OpKind::GemmReduceScatter => send_gap_ns,
        };
        let (kernel, device) = (self.kernel.variant(), &self.device.info().name);
        let (ctas, lent) = self.lent;
        let lent = match lent {
            Lent::NONE => String::new(),
            Lent { last: 0, .. } => format!(", {ctas} more ahead of messages"),
            Lent { first: 0, .. } => format!(", {ctas} more behind messages"),
            Lent { .. } => format!(", {ctas} more ahead of messages and behind them"),
        };
        format!("kernel {kernel} on {device}, {} worker CTAs{mover}{lent}, gaps of {gaps} ns", self.workers)
    }
}

/// The launches of a call whose messages go beside it.
struct Launches {
    first: Option<(Part, usize)>,
    workers: Part,
    last: Option<(Part, usize)>,
}

/// Whether messages carry what a launch stores.
fn is_stored(exchange: &Exchange<'_>) -> bool {
    matches!(exchange.source, Source::Stored { .. }) && !exchange.rounds.is_empty()
}

/// The variant in the current context: as an op before has loaded it, or loaded now.
fn kernel(variant: Variant) -> Result<Arc<Kernel>, BuildError> {
    loaded(variant, || {
        let cubin = flux_kernels::cubin(&variant.source(), Arch::Sm90a)?;
        if cubin.origin == Origin::Compiled {
            tracing::info!(kernel = %variant, "compiled; the next process finds it in the cache");
        }
        Ok(cubin.image)
    })
}
