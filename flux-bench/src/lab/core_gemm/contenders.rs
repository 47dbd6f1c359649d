//! The contenders at one shape, on one GPU.
//!
//! Invariant: a sample is the time between two events on the one stream, a call's share of it. The
//! peers' signals are raised before it, a spinning kernel hides the launches, and every call takes
//! the next operand set.

use super::Args;
use super::mock_peers;
use super::operands::OperandBlocks;
use super::replay::Replay;
use super::sm80_gemm::{kernels_of, launch, sm80_gemm};
use crate::bench::{SEED, WARM_UP, gpu_contenders::SETS, in_round};
use crate::harness::gpu::cublas::{CublasError, Gemm, GemmShape};
use crate::harness::gpu::{Gpu, choice, kernels};
use crate::harness::scaled::{Part, bytes_behind_rows};
use crate::harness::{
    FIRST, Fill, MadeBy, Operands, PlannedLayer, Span, Times, Verdict, reference, w_window,
    x_window,
};
use anyhow::Context;
use flux_core::program::TileProgram;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Problem, Scales};
use flux_cuda::DeviceBlock;
use flux_kernels::cuda::{Kernel, loaded};
use flux_kernels::{Variant, with_elements};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is timed; the module says what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// The fastest of the algorithms that cuBLASLt proposes first.
    Gemm,
    /// The kernel on the local shape as a world of 1.
    Core,
    /// Rank 0's program without waits for peers.
    Order,
    /// Rank 0's program, every signal raised before.
    Flags,
    /// The fastest cuBLASLt algorithm with kernels of sm_80.
    Sm80Gemm,
}

impl Contender {
    /// Every one.
    pub(super) const ALL: [Self; 5] =
        [Self::Gemm, Self::Core, Self::Order, Self::Flags, Self::Sm80Gemm];

    /// Those of a measurement, with what there is of the library's.
    pub(super) fn of(library: bool, sm80: bool) -> Vec<Self> {
        let takes_part = |contender: &Self| match contender {
            Self::Gemm => library,
            Self::Core | Self::Order | Self::Flags => true,
            Self::Sm80Gemm => sm80,
        };
        Self::ALL.into_iter().filter(takes_part).collect()
    }
}

/// The contenders that run the kernel.
const OURS: [Contender; 3] = [Contender::Core, Contender::Order, Contender::Flags];

/// The number of a contender among them; none of the baseline.
fn among_ours(contender: Contender) -> Option<usize> {
    OURS.iter().position(|&ours| ours == contender)
}

/// One shape's contenders, with all that they take.
#[derive(Debug)]
pub(super) struct KernelContenders<'a> {
    gpu: &'a Gpu,
    case: &'a PlannedLayer,
    kernel: Arc<Kernel>,
    /// The library's, or why it has none.
    gemm: Result<Gemm, String>,
    sm80_gemm: Option<Gemm>,
    sets: Vec<OperandBlocks>,
    /// In the order of [`OURS`].
    ours: [Replay; 3],
    /// The other ranks of a sum, which make what rank 0 adds.
    peers: Vec<Replay>,
    /// Rank 0's data region: gather buffer or slots, both halves.
    own: DeviceBlock,
    // What the peers' addresses point into, and the world of 1's.
    _elsewhere: [DeviceBlock; 2],
    spin: Duration,
    calls: usize,
    args: &'a Args,
}

/// What contenders took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) gemm: Option<Times>,
    /// In the order of [`OURS`].
    pub(super) ours: [Times; 3],
    pub(super) sm80: Option<Times>,
}

impl<'a> KernelContenders<'a> {
    pub(super) fn new(
        gpu: &'a Gpu,
        case: &'a PlannedLayer,
        args: &'a Args,
    ) -> anyhow::Result<Self> {
        let (problem, device) = (&case.problem, gpu.device());
        let variant = Variant::of(&case.program(FIRST)?, kernels::of_device(device)?)?;
        device.bind()?;
        let kernel = loaded(variant, || kernels::fused(device, variant))?;
        let gemm = library_gemm(gpu, &case.alone)?;
        let sets = (0..SETS)
            .map(|_| OperandBlocks::new(gpu, &case.alone))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let sm80_gemm = sm80_gemm(gpu, &case.alone, &sets[0])?;
        let region =
            |program: &TileProgram| gpu.alloc(program.workspace().data_bytes().max(16) as usize);
        let (core, first) = (case.core()?, case.program(FIRST)?);
        let [own, elsewhere, of_core] = [region(&first)?, region(&first)?, region(&core)?];
        let data = mock_peers::data_of_first(&first, own.address(), elsewhere.address());
        let peers = if problem.op().gathers() {
            Vec::new()
        } else {
            let data =
                mock_peers::data_of_peer(problem.world(), own.address(), elsewhere.address());
            let harness = |rank| Replay::new(gpu, &kernel, case.program(rank)?, data.clone());
            problem.world().ranks().skip(1).map(harness).collect::<anyhow::Result<_>>()?
        };
        let core = Replay::new(gpu, &kernel, core, vec![of_core.address()])?;
        let order = Replay::new(gpu, &kernel, case.order()?, data.clone())?;
        let flags = Replay::new(gpu, &kernel, first, data)?;
        Ok(Self {
            ours: [core, order, flags],
            gpu,
            case,
            kernel,
            gemm,
            sm80_gemm,
            sets,
            peers,
            own,
            _elsewhere: [elsewhere, of_core],
            spin: choice::SPIN,
            calls: 0,
            args,
        })
    }

    pub(super) fn plan(&self) -> String {
        let [core, _, flags] = &self.ours;
        let (kernel, alone, as_first) = (self.kernel.variant(), core.workers, flags.workers);
        format!("{}; kernel {kernel}, {alone} CTAs alone and {as_first} as rank 0", self.case.plan)
    }

    /// Kernels of the chosen algorithm of sm_80.
    pub(super) fn sm80_kernels(&self) -> anyhow::Result<Option<Vec<String>>> {
        self.sm80_gemm.as_ref().map(|gemm| kernels_of(self.gpu, gemm, &self.sets[0])).transpose()
    }

    fn contenders(&self) -> Vec<Contender> {
        Contender::of(self.gemm.is_ok(), self.sm80_gemm.is_some())
    }

    /// Times all contenders on random data.
    pub(super) fn measure(&mut self, samples: u32) -> anyhow::Result<Measured> {
        self.prepare()?;
        let contenders = self.contenders();
        let mut spans = Contender::ALL.map(|_| Vec::<Span>::new());
        for round in 0..WARM_UP + samples as usize {
            for contender in in_round(&contenders, round) {
                let span = self
                    .sample(contender)
                    .with_context(|| format!("{contender:?}, round {round}"))?;
                if round >= WARM_UP {
                    spans[contender as usize].push(span);
                }
            }
        }
        // Before anything is said of times: a call that gave up waiting is a fast one.
        self.ours.iter().try_for_each(|harness| harness.check(self.gpu))?;
        let [gemm, core, order, flags, sm80] = spans.map(|spans| Times::of_slowest(&[spans]));
        let ours = core.zip(order).zip(flags).map(|((core, order), flags)| [core, order, flags]);
        Ok(Measured { gemm, ours: ours.context("no rounds")?, sm80 })
    }

    /// Fills all sets and both buffers with random data, and chooses algorithms and spin.
    fn prepare(&mut self) -> anyhow::Result<()> {
        for epoch in [Epoch::FIRST, Epoch::FIRST.next()] {
            self.arrive(epoch, &self.operands(Contender::Flags, 0, Fill::Uniform))?;
        }
        for (call, set) in (0..).zip(&self.sets) {
            self.fill_own(set, &self.operands(Contender::Core, call, Fill::Uniform))?;
        }
        let contenders = self.contenders();
        for &contender in contenders.iter().filter(|&&of| among_ours(of).is_none()) {
            self.choose_algorithm(contender)?;
        }
        let longest = choice::longest_enqueue(&contenders, |contender, _| {
            self.raise(contender)?;
            let start = Instant::now();
            self.launch_sample(contender)?;
            let took = start.elapsed();
            self.gpu.synchronize()?;
            Ok(took)
        })?;
        self.spin = choice::spin(longest);
        Ok(())
    }

    /// Chooses the fastest candidate of a library's GEMM.
    fn choose_algorithm(&mut self, contender: Contender) -> anyhow::Result<()> {
        let short = choice::shortlist(self.library_gemm(contender)?.candidates(), |candidate| {
            self.launch_candidate(contender, candidate)?;
            Ok(self.sample(contender)?.end)
        })?;
        let best = choice::fastest(short.len(), |at| {
            self.launch_candidate(contender, short[at])?;
            let spans = choice::settled(|_| self.sample(contender))?;
            Ok(Times::of_slowest(&[spans]).context("no samples")?.median)
        })?;
        self.library_gemm(contender)?.choose(short[best]);
        Ok(())
    }

    /// The first launch of an algorithm loads its kernel.
    fn launch_candidate(&mut self, contender: Contender, candidate: usize) -> anyhow::Result<()> {
        self.library_gemm(contender)?.choose(candidate);
        self.launch(contender, 0)
    }

    fn library_gemm(&mut self, contender: Contender) -> anyhow::Result<&mut Gemm> {
        match contender {
            Contender::Sm80Gemm => {
                self.sm80_gemm.as_mut().context("cuBLASLt has no algorithm of sm_80 for the shape")
            }
            _ => self.gemm.as_mut().map_err(|why| anyhow::anyhow!("{why}")),
        }
    }

    fn sample(&mut self, contender: Contender) -> anyhow::Result<Span> {
        let gpu = self.gpu;
        self.raise(contender)?;
        gpu.spin(self.spin)?;
        let end = gpu.time(|| self.launch_sample(contender))?;
        Ok(Span { start: 0.0, end: end / f64::from(self.args.calls) })
    }

    /// The calls of a sample, whose first has its signals.
    fn launch_sample(&mut self, contender: Contender) -> anyhow::Result<()> {
        for call in 0..self.args.calls {
            if call > 0 {
                self.raise(contender)?;
            }
            self.launch(contender, self.calls % SETS)?;
            self.calls += 1;
        }
        Ok(())
    }

    /// What peers raise before the contender's next call, in order on the stream.
    fn raise(&self, contender: Contender) -> anyhow::Result<()> {
        among_ours(contender).map_or(Ok(()), |ours| self.ours[ours].raise(self.gpu))
    }

    fn launch(&mut self, contender: Contender, set: usize) -> anyhow::Result<()> {
        let (gpu, set) = (self.gpu, &self.sets[set]);
        if let Some(ours) = among_ours(contender) {
            let constant_weights = self.args.constant_weights;
            return self.ours[ours].launch(gpu, &self.kernel, set, constant_weights);
        }
        let gemm = if contender == Contender::Sm80Gemm {
            self.sm80_gemm.as_ref()
        } else {
            self.gemm.as_ref().ok()
        };
        Ok(launch(gpu, gemm.context("no such contender")?, set, gpu.raw_stream())?)
    }

    /// A contender's operands: of the GEMM alone, or of the world, with the same elements.
    fn operands(&self, contender: Contender, call: u64, fill: Fill) -> Operands {
        let alone = matches!(contender, Contender::Gemm | Contender::Sm80Gemm | Contender::Core);
        Operands::new(if alone { self.case.alone } else { self.case.problem }, SEED, call, fill)
    }

    /// Rank 0's `w`, and all of the local `x`, of which an AllGather-GEMM's shard is the first
    /// rows.
    fn fill_own(&self, set: &OperandBlocks, operands: &Operands) -> anyhow::Result<()> {
        let alone = &self.case.alone;
        set.fill(self.gpu, operands, [x_window(alone, FIRST), w_window(alone, FIRST)], FIRST)
    }

    /// Writes what peers give to rank 0 in this epoch: rows, or partial tiles by their own
    /// programs. Uses the first set.
    fn arrive(&mut self, epoch: Epoch, operands: &Operands) -> anyhow::Result<()> {
        let (gpu, problem, program) = (self.gpu, &self.case.problem, self.ours[2].program());
        if problem.op().gathers() {
            let half = epoch.half() * program.workspace().half_stride() as usize;
            let (rows, dtype) = (mock_peers::gathered(program), problem.numerics().operand);
            if problem.numerics().scales == Scales::None {
                return gpu.fill(&self.own, half, rows, operands.seed_x, operands.fill, dtype);
            }
            let of_x = Part::of_x(problem, operands.generator_of_x(), rows, FIRST);
            return gpu.fill_codes(&self.own, half, &of_x, bytes_behind_rows(problem));
        }
        for peer in 0..self.peers.len() {
            let rank = self.peers[peer].program().rank;
            let (x, w) = (x_window(problem, rank), w_window(problem, rank));
            self.sets[0].fill(gpu, operands, [x, w], rank)?;
            let harness = &mut self.peers[peer];
            harness.begin_at(gpu, epoch)?;
            harness.raise(gpu)?;
            harness.launch(gpu, &self.kernel, &self.sets[0], false)?;
            harness.check(gpu)?;
        }
        Ok(())
    }

    /// One call of each contender of ours: exact with integers, within the bound with random data.
    pub(super) fn verify(&mut self, fill: Fill) -> anyhow::Result<Verdict> {
        OURS.into_iter().try_fold(Verdict::default(), |sum, contender| {
            let verdict = self
                .verify_one(contender, fill)
                .with_context(|| format!("{contender:?}, verified with {fill:?} data"))?;
            Ok(sum.merge(verdict))
        })
    }

    fn verify_one(&mut self, contender: Contender, fill: Fill) -> anyhow::Result<Verdict> {
        let operands = self.operands(contender, 0, fill);
        if contender != Contender::Core
            && let Some(ours) = among_ours(contender)
        {
            self.arrive(self.ours[ours].epoch, &operands)?;
        }
        self.checked(contender, &operands)
    }

    /// One call of a contender, its output poisoned before and checked as a whole.
    fn checked(&mut self, contender: Contender, operands: &Operands) -> anyhow::Result<Verdict> {
        let (gpu, y) = (self.gpu, &self.sets[0].y);
        self.fill_own(&self.sets[0], operands)?;
        gpu.poison(y.address(), y.bytes())?;
        self.raise(contender)?;
        self.launch(contender, 0)?;
        let ours = among_ours(contender).map(|ours| &self.ours[ours]);
        ours.map_or(Ok(()), |replay| replay.check(gpu))?;
        let made_by = MadeBy {
            flattened: ours.is_some_and(|replay| replay.program().rows.is_flattened()),
            unfused: false,
            nodes: Nodes::apart(operands.problem.world()),
        };
        gpu.verify(operands, FIRST, self.sets[0].y.address(), made_by)
    }

    /// How far a sample of what the first set's `y` holds is off; see [`reference::rms_error`].
    fn rms_error(&self, operands: &Operands) -> anyhow::Result<f64> {
        let y = &self.sets[0].y;
        let mut bytes = vec![0; y.bytes()];
        self.gpu.download(y, 0, &mut bytes)?;
        with_elements!(operands.problem.numerics(), X, Y, {
            let y = bytemuck::cast_slice::<_, Y>(&bytes);
            Ok(reference::rms_error::<X, Y>(operands, FIRST, y))
        })
    }

    /// One call of the kernel and one of the library's GEMM on random operands with scales: how far
    /// either is off. A library whose result is wrong has no times.
    pub(super) fn rms_errors(
        &mut self,
        measured: &mut Measured,
    ) -> anyhow::Result<Option<[Option<f64>; 2]>> {
        if self.case.alone.numerics().scales == Scales::None {
            return Ok(None);
        }
        let mut errors = [None; 2];
        for (number, contender) in [Contender::Core, Contender::Gemm].into_iter().enumerate() {
            if contender == Contender::Gemm && self.gemm.is_err() {
                continue;
            }
            let operands = self.operands(contender, 0, Fill::Uniform);
            let verdict = self.checked(contender, &operands)?;
            errors[number] = Some(self.rms_error(&operands)?);
            if contender == Contender::Gemm && !verdict.ok() {
                self.gemm = Err(format!("cuBLASLt's result is wrong: {verdict}"));
                measured.gemm = None;
            }
        }
        Ok(Some(errors))
    }

    /// Why the library has no GEMM, if it has none.
    pub(super) fn no_gemm(&self) -> Option<String> {
        self.gemm.as_ref().err().cloned()
    }
}

/// The library's GEMM, or why it has none with such scales.
fn library_gemm(gpu: &Gpu, alone: &Problem) -> anyhow::Result<Result<Gemm, String>> {
    match Gemm::new(gpu.device(), GemmShape::of(alone, FIRST), alone.numerics()) {
        Err(why @ CublasError::Scales { .. }) => Ok(Err(why.to_string())),
        gemm => Ok(Ok(gemm?)),
    }
}
