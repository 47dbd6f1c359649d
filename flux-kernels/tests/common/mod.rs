//! A world of ranks on one GPU, without a transport: every rank has its own memory and stream, and
//! its share of the multiprocessors.

#[path = "../../../flux-transport/tests/lateness/mod.rs"]
pub(crate) mod lateness;
#[path = "../skipped/mod.rs"]
mod skipped;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use flux_core::layout::{self, WorkspaceSize, control};
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::Shape;
use flux_core::program::{Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::{Nodes, OpKind, Problem, Rank, Scales};
use flux_cuda::ComputeCapability;
use flux_kernels::cuda::{
    DeviceProgram, Kernel, LaunchArgs, LaunchStart, Matrix, Pace, ResultRows, launch,
};
use flux_kernels::harness::{Expected, Fill, Harness, Seeds, VerifyReport, Window};
use flux_kernels::{
    Activation, GateLayout, KernelTarget, NoKernel, Operand, OperandList, Shapes, Source, Variant,
    WeightLayout,
};
use lateness::AMPLE;
use std::sync::Arc;

/// Device memory, freed on drop.
pub(crate) struct Memory(pub(crate) u64);

impl Memory {
    pub(crate) fn new(bytes: u64) -> Self {
        // SAFETY: a context is current in every test; the memory is initialised before it is read.
        Self(unsafe { result::malloc_sync(bytes.max(16) as usize) }.expect("device memory"))
    }

    pub(crate) fn words(bytes: u64, value: u32) -> Self {
        let this = Self::new(bytes);
        // SAFETY: the range was just allocated.
        unsafe { sys::cuMemsetD32_v2(this.0, value, (bytes / 4) as usize) }
            .result()
            .expect("memset");
        this
    }

    pub(crate) fn write(&self, offset: u64, words: &[u32]) {
        // SAFETY: tests write inside of what they allocated.
        unsafe { result::memcpy_htod_sync(self.0 + offset, words) }.expect("copy");
    }

    pub(crate) fn read<T: Copy + Default>(&self, offset: u64, count: usize) -> Vec<T> {
        let mut to = vec![T::default(); count];
        // SAFETY: tests read inside of what they allocated.
        unsafe { result::memcpy_dtoh_sync(&mut to, self.0 + offset) }.expect("copy");
        to
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// The device, where the kernels run on it; else the test is skipped.
pub(crate) fn device(test: &str) -> Option<Arc<CudaContext>> {
    // cudarc panics on a missing driver.
    let driver = flux_cuda::available().map_err(|why| why.to_string());
    let context = driver
        .and_then(|()| CudaContext::new(0).map_err(|_| "the driver offers no device 0".to_owned()));
    let suited = context.and_then(|context| match target_of(&context) {
        Ok(_) => Ok(context),
        Err(why) => Err(format!("{}: {why}", context.name().expect("a device's name"))),
    });
    let context = suited.map_err(|why| skipped::skip(test, &why)).ok()?;
    context.bind_to_thread().expect("context");
    Some(context)
}

fn target_of(context: &CudaContext) -> Result<KernelTarget, NoKernel> {
    let (major, minor) = context.compute_capability().expect("a device's compute capability");
    KernelTarget::of(ComputeCapability::new(major.unsigned_abs(), minor.unsigned_abs()))
}

/// The kernels of a device that has some.
pub(crate) fn target(context: &CudaContext) -> KernelTarget {
    target_of(context).expect("a kernel for the device")
}

pub(crate) fn cubin(context: &CudaContext, source: &Source) -> Vec<u8> {
    flux_kernels::cubin(source, target(context).arch).expect("a cubin").image
}

/// Every rank's program, of ranks in nodes.
pub(crate) fn programs(problem: Problem, schedule: &Schedule, nodes: Nodes) -> Vec<TileProgram> {
    problem
        .world()
        .ranks()
        .map(|r| TileProgram::build_across(&problem, r, schedule, nodes).expect("a program"))
        .collect()
}

/// Bytes between rows of a rank's `x`, behind each of which are its scales if it is gathered.
fn x_row_bytes(problem: &Problem, rank: Rank) -> u64 {
    if problem.op().gathers() {
        problem.gathered_row_bytes()
    } else {
        u64::from(problem.k_local(rank)) * problem.numerics().operand.bytes() as u64
    }
}

struct RankState {
    program: DeviceProgram,
    stream: Arc<CudaStream>,
    x: Memory,
    w: Memory,
    scale_x: Memory,
    scale_w: Memory,
    y: Memory,
    bias: Memory,
    residual: Memory,
    control: Memory,
    fault: Memory,
}

/// Ranks that share the device.
pub(crate) struct World {
    pub(crate) problem: Problem,
    kernel: Kernel,
    harness: Harness,
    ranks: Vec<RankState>,
    data: Vec<Memory>,
    pads: Vec<Memory>,
    size: WorkspaceSize,
    /// Gaps of pushes and sends.
    pub(crate) pace: Pace,
    /// CTAs of a rank.
    pub(crate) workers: u32,
    pub(crate) deadline_ns: u64,
    /// Number of the op of the calls that are enqueued.
    pub(crate) op: u32,
    /// Seed of a bias, which the next [`World::prepare`] fills and calls add.
    pub(crate) bias: Option<u64>,
    /// The same of a residual of the shape of `y`.
    pub(crate) residual: Option<u64>,
    /// Whether `y` itself holds it.
    pub(crate) residual_in_y: bool,
    /// How gates and ups lie, on a kernel with gates.
    pub(crate) gates: Option<GateLayout>,
    /// Of the result, or of gates.
    pub(crate) activation: Activation,
    epoch: Epoch,
}

impl World {
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        problem: Problem,
        schedule: &Schedule,
        first: Epoch,
    ) -> Self {
        let programs = programs(problem, schedule, Nodes::apart(problem.world()));
        let variant = Variant::of(&programs[0], target(context)).expect("a variant");
        Self::with(context, programs, variant, first)
    }

    /// With these programs of the ranks, on this kernel; of an AllGather-GEMM of several nodes
    /// nobody would pass rows on.
    pub(crate) fn with(
        context: &Arc<CudaContext>,
        programs: Vec<TileProgram>,
        variant: Variant,
        first: Epoch,
    ) -> Self {
        let problem = programs[0].problem;
        let kernel =
            Kernel::load(variant, &cubin(context, &variant.source())).expect("the kernel loads");
        let harness =
            Harness::load(&cubin(context, &Source::harness())).expect("the harness loads");
        let size = programs.iter().fold(WorkspaceSize::default(), |s, p| s.max(p.workspace()));
        let bytes = |s: Shape, element: u64| u64::from(s.rows) * u64::from(s.cols) * element;
        let numerics = problem.numerics();
        let (operand, output) = (numerics.operand.bytes() as u64, numerics.output.bytes() as u64);
        let ranks: Vec<_> = programs
            .into_iter()
            .map(|program| {
                let rank = program.rank;
                let shapes = Shapes::new(&problem, rank);
                let control = Memory::words(control::bytes(size.counters), 0);
                control.write(control::EPOCH, &[first.get()]);
                RankState {
                    program: DeviceProgram::upload(program, &kernel).expect("an upload"),
                    stream: context.new_stream().expect("a stream"),
                    x: Memory::new(
                        x_row_bytes(&problem, rank) * u64::from(problem.x_shape(rank).rows),
                    ),
                    w: Memory::new(bytes(problem.w_shape(rank), operand)),
                    scale_x: Memory::new(bytes(shapes.of_operand(Operand::ScaleX, 0), 4)),
                    scale_w: Memory::new(bytes(shapes.of_operand(Operand::ScaleW, 0), 4)),
                    y: Memory::new(bytes(problem.y_shape(rank), output)),
                    bias: Memory::new(u64::from(problem.n_local(rank)) * output),
                    residual: Memory::new(bytes(problem.y_shape(rank), output)),
                    control,
                    fault: Memory::words(layout::FAULT_BYTES, 0),
                }
            })
            .collect();
        let data = ranks.iter().map(|_| Memory::words(size.data_bytes(), u32::MAX)).collect();
        let pad = |_| {
            let pad = Memory::words(layout::pad_bytes(size.signals), first.before(1).get());
            pad.write(0, &[0; layout::BROKEN_BYTES as usize / 4]);
            pad
        };
        let pads = ranks.iter().map(pad).collect();
        context.synchronize().expect("initialised");
        let workers = kernel.multiprocessors() / ranks.len() as u32;
        let (pace, deadline_ns) = (Pace::default(), AMPLE.as_nanos() as u64);
        Self {
            problem,
            kernel,
            harness,
            ranks,
            data,
            pads,
            size,
            pace,
            workers,
            deadline_ns,
            op: 1,
            bias: None,
            residual: None,
            residual_in_y: false,
            gates: variant.is_gated().then_some(GateLayout::Concatenated),
            activation: Activation::None,
            epoch: first,
        }
    }

    fn raw(&self, rank: usize) -> usize {
        self.ranks[rank].stream.cu_stream() as usize
    }

    /// The shape of a rank's `y`.
    fn y_shape(&self, rank: Rank) -> Shape {
        GateLayout::result_shape(self.gates, self.problem.y_shape(rank))
    }

    /// Fills every rank's operands and poisons its result and the halves that the next call uses.
    pub(crate) fn prepare(&self, seeds: Seeds, fill: Fill) {
        let p = &self.problem;
        for (i, rank) in self.ranks.iter().enumerate() {
            let r = p.world().ranks().nth(i).expect("a rank");
            let x0 = match p.op() {
                OpKind::AllGatherGemm => (p.shard_rows(r).start, 0),
                OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (0, p.inner(r).start),
            };
            let w0 = (p.columns(r).start, p.inner(r).start);
            let window = |m: &Memory, s: Shape, at: (u32, u32)| Window {
                address: m.0,
                row_stride: u64::from(s.cols),
                row0: at.0,
                col0: at.1,
                rows: s.rows,
                cols: s.cols,
                transposed: false,
            };
            let of_weights = |window: Window| match self.kernel.variant().weights() {
                WeightLayout::Nk => window,
                WeightLayout::Kn => {
                    Window { row_stride: u64::from(window.rows), transposed: true, ..window }
                }
            };
            let stream = self.raw(i);
            let y = self.y_shape(r);
            // SAFETY: the windows are this rank's whole buffers.
            unsafe {
                self.harness
                    .fill(
                        Window {
                            row_stride: x_row_bytes(p, r) / p.numerics().operand.bytes() as u64,
                            ..window(&rank.x, p.x_shape(r), x0)
                        },
                        seeds.x,
                        fill,
                        p.numerics().operand,
                        stream,
                    )
                    .expect("fill");
                self.harness
                    .fill(
                        of_weights(window(&rank.w, p.w_shape(r), w0)),
                        seeds.w,
                        fill,
                        p.numerics().operand,
                        stream,
                    )
                    .expect("fill");
                if p.numerics().scales != Scales::None {
                    let scales = [(self.scales_of_x(i), seeds.x), (self.scales_of_w(i), seeds.w)];
                    for (to, seed) in scales {
                        self.harness.fill_scales(to, seed, fill, stream).expect("fill");
                    }
                }
                if let Some(seed) = self.bias {
                    let col0 = p.columns(r).start;
                    let shape = Shape { rows: 1, cols: p.n_local(r) };
                    self.harness
                        .fill(
                            window(&rank.bias, shape, (0, col0)),
                            seed,
                            fill,
                            p.numerics().output,
                            stream,
                        )
                        .expect("fill");
                }
                self.harness
                    .poison(rank.y.0, u64::from(y.rows) * u64::from(y.cols) * 2, stream)
                    .expect("poison");
                if let Some(seed) = self.residual {
                    let to = if self.residual_in_y { &rank.y } else { &rank.residual };
                    self.harness
                        .fill(
                            window(to, y, (p.y_rows(r).start, 0)),
                            seed,
                            fill,
                            p.numerics().output,
                            stream,
                        )
                        .expect("fill");
                }
                let half = self.data[i].0 + self.epoch.half() as u64 * self.size.half_stride();
                self.harness.poison(half, self.size.half_bytes, stream).expect("poison");
            }
        }
        self.synchronize();
    }

    /// A rank's scales of `x`, behind its rows where they carry them, in the matrix of all ranks'.
    fn scales_of_x(&self, i: usize) -> Window {
        let (p, rank) = (&self.problem, Rank::new(i as u32));
        let (rows, inner) = (p.shard_rows(rank), p.inner(rank));
        let shape = self.shape_of(Operand::ScaleX, rank);
        let gathers = p.op().gathers();
        let (row0, col0) = match p.numerics().scales {
            Scales::Row | Scales::Block if gathers => (rows.start, 0),
            Scales::Block => (0, inner.start / SCALE_BLOCK),
            Scales::Tensor if gathers => (0, 0),
            _ => (0, rank.get()),
        };
        let (address, row_stride) = if gathers && p.rows_carry_scales() {
            let codes = u64::from(p.k()) * p.numerics().operand.bytes() as u64;
            (self.ranks[i].x.0 + codes, x_row_bytes(p, rank) / size_of::<f32>() as u64)
        } else {
            (self.ranks[i].scale_x.0, shape.cols.into())
        };
        let Shape { rows, cols } = shape;
        Window { address, row_stride, row0, col0, rows, cols, transposed: false }
    }

    /// A rank's scales of `w`, in the matrix of all ranks'. Those of rows are a row.
    fn scales_of_w(&self, i: usize) -> Window {
        let (p, rank) = (&self.problem, Rank::new(i as u32));
        let (columns, inner) = (p.columns(rank), p.inner(rank));
        let Shape { rows, cols } = self.shape_of(Operand::ScaleW, rank);
        let (row0, col0) = match p.numerics().scales {
            Scales::Block => (columns.start / SCALE_BLOCK, inner.start / SCALE_BLOCK),
            Scales::Row if p.op().gathers() => (columns.start, 0),
            Scales::Tensor if p.op().gathers() => (0, 0),
            _ => (0, rank.get()),
        };
        let transposed = p.numerics().scales == Scales::Row;
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        let row_stride = if transposed { rows } else { cols }.into();
        let address = self.ranks[i].scale_w.0;
        Window { address, row_stride, row0, col0, rows, cols, transposed }
    }

    fn shape_of(&self, operand: Operand, rank: Rank) -> Shape {
        let layout = self.kernel.variant().weights();
        let gates = self.gates;
        Shapes { layout, gates, ..Shapes::new(&self.problem, rank) }.of_operand(operand, 0)
    }

    /// Enqueues one rank's call.
    pub(crate) fn enqueue(&self, i: usize) {
        let rank = &self.ranks[i];
        let (p, r) = (&self.problem, Rank::new(i as u32));
        let numerics = p.numerics();
        let addresses = |m: &[Memory]| m.iter().map(|m| m.0).collect::<Vec<_>>();
        let layout = self.kernel.variant().weights();
        let shapes = Shapes { layout, gates: self.gates, ..Shapes::new(p, r) };
        let mut operands = OperandList::new();
        let mut give = |operand: Operand, from: &Memory| {
            let element = shapes.element(operand).bytes() as u64;
            let row_bytes = u64::from(shapes.of_operand(operand, 0).cols) * element;
            operands.set(operand, 0, Matrix { address: from.0, row_bytes });
        };
        give(Operand::W, &rank.w);
        give(Operand::Y, &rank.y);
        if self.bias.is_some() {
            give(Operand::Bias, &rank.bias);
        }
        if self.residual.is_some() {
            let from = if self.residual_in_y { &rank.y } else { &rank.residual };
            give(Operand::Residual, from);
        }
        operands.set(Operand::X, 0, Matrix { address: rank.x.0, row_bytes: x_row_bytes(p, r) });
        if numerics.scales != Scales::None {
            let scales =
                [(Operand::ScaleX, self.scales_of_x(i)), (Operand::ScaleW, self.scales_of_w(i))];
            for (operand, at) in scales {
                let row_bytes = at.row_stride * size_of::<f32>() as u64;
                operands.set(operand, 0, Matrix { address: at.address, row_bytes });
            }
        }
        let args = LaunchArgs {
            operands,
            result_rows: ResultRows { first: 0, count: p.y_shape(r).rows },
            gates: self.gates,
            activation: self.activation,
            data: &addresses(&self.data),
            pads: &addresses(&self.pads),
            scatter_buffer: self.data[i].0,
            control: rank.control.0,
            fault: rank.fault.0,
            half_stride: self.size.half_stride(),
            op_hash: self.op,
            sequential: false,
            deadline_ns: self.deadline_ns,
            await_pushed: false,
            workers: self.workers,
            push: true,
            pace: self.pace,
            trace: None,
            // Ranks share the device.
            start: LaunchStart::Behind,
            stream: self.raw(i),
        };
        // SAFETY: the programs are as they were built; all memory belongs to this world and
        // outlives the launch.
        unsafe { launch(&self.kernel, &rank.program, &args) }.expect("a launch");
    }

    /// Delays one rank's stream.
    pub(crate) fn delay(&self, i: usize, ns: u64) {
        self.harness.spin(ns, self.raw(i)).expect("a spin");
    }

    pub(crate) fn synchronize(&self) {
        for rank in &self.ranks {
            rank.stream.synchronize().expect("the stream ends");
        }
    }

    /// One call on all ranks, to its end.
    pub(crate) fn call(&mut self) {
        for i in 0..self.ranks.len() {
            self.enqueue(i);
        }
        self.synchronize();
        self.epoch = self.epoch.next();
    }

    /// Milliseconds of one rank's call, each of `count` times.
    pub(crate) fn time(&mut self, count: usize) -> Vec<f32> {
        let context = Arc::clone(self.ranks[0].stream.context());
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        (0..count)
            .map(|_| {
                // hides the cost of the launch
                self.delay(0, 50_000);
                let (a, b) = (
                    context.new_event(flags).expect("event"),
                    context.new_event(flags).expect("event"),
                );
                a.record(&self.ranks[0].stream).expect("record");
                self.call();
                b.record(&self.ranks[0].stream).expect("record");
                a.elapsed_ms(&b).expect("elapsed")
            })
            .collect()
    }

    pub(crate) fn verify(&self, seeds: Seeds, fill: Fill) -> Vec<VerifyReport> {
        let p = &self.problem;
        let program = self.ranks[0].program.program();
        let (flattened, per_node) = (program.rows.is_flattened(), program.nodes.per_node());
        let expected = Expected {
            seeds,
            fill,
            bias: self.bias,
            residual: self.residual,
            activation: self.activation,
            gates: self.gates,
            flattened,
            per_node,
            unfused: false,
        };
        p.world()
            .ranks()
            .map(|r| {
                let (y, stride) = (self.ranks[r.index()].y.0, u64::from(self.y_shape(r).cols));
                // SAFETY: `y` is this rank's result.
                unsafe { self.harness.verify(p, r, y, stride, &expected, self.raw(r.index())) }
                    .expect("verify")
            })
            .collect()
    }

    pub(crate) fn result(&self, i: usize) -> Vec<u16> {
        let y = self.y_shape(Rank::new(i as u32));
        self.ranks[i].y.read(0, y.rows as usize * y.cols as usize)
    }

    /// Leaves rank `i` as after a wait that failed.
    pub(crate) fn poison(&self, i: usize) {
        self.ranks[i].control.write(control::POISON, &[1]);
    }

    /// Rank `i` has given up, as far as `reader` hears.
    pub(crate) fn give_up(&self, i: u32, reader: usize) {
        self.pads[reader].write(layout::broken_offset(i), &[layout::fault::TIMED_OUT]);
    }

    /// The word of a signal of rank `i`, of the half of the call.
    pub(crate) fn signal(&self, i: usize, index: u32) -> u32 {
        self.pads[i].read(layout::signal_offset(index, self.epoch.half()), 1)[0]
    }

    /// The words of rank `i`'s signals, of both halves.
    pub(crate) fn signals(&self, i: usize) -> Vec<u32> {
        let offsets = (0..self.size.signals)
            .flat_map(|signal| [0, 1].map(|half| layout::signal_offset(signal, half)));
        offsets.map(|offset| self.pads[i].read(offset, 1)[0]).collect()
    }

    pub(crate) fn epoch(&self, i: usize) -> u32 {
        self.ranks[i].control.read(control::EPOCH, 1)[0]
    }

    pub(crate) fn fault(&self, i: usize) -> layout::FaultRecord {
        let words: Vec<u32> = self.ranks[i].fault.read(0, 16);
        bytemuck::pod_read_unaligned(bytemuck::cast_slice(&words))
    }
}
