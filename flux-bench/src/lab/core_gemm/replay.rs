//! A replay harness: a program on the GPU with the signals that its calls await.
//!
//! Invariant: no two share a pad or a control block, as their epochs differ.

use super::mock_peers::{self, Words};
use super::operands::OperandBlocks;
use crate::harness::gpu::Gpu;
use anyhow::ensure;
use flux_core::layout::{BROKEN_BYTES, FAULT_BYTES, FaultRecord, LINE, control, pad_bytes};
use flux_core::program::TileProgram;
use flux_core::signal::Epoch;
use flux_core::tile::Generation;
use flux_cuda::DeviceBlock;
use flux_kernels::Activation;
use flux_kernels::cuda::{
    DeviceProgram, Kernel, LaunchArgs, LaunchStart, Pace, ResultRows, launch,
};
use flux_ops::internal::launch_of;

/// Longest wait of a call. Nothing has to be waited for: only an error waits.
const DEADLINE_NS: u64 = 10_000_000_000;

/// A rank's program, ready to be launched.
#[derive(Debug)]
pub(super) struct Replay {
    program: DeviceProgram,
    data: Vec<u64>,
    pads: Vec<u64>,
    // Every rank's, the own among them.
    pad_memory: DeviceBlock,
    control: DeviceBlock,
    fault: DeviceBlock,
    raised: Vec<Words>,
    pub(super) workers: u32,
    pace: Pace,
    /// Of the next call.
    pub(super) epoch: Epoch,
}

impl Replay {
    /// Uploads `program`, whose ranks' data regions are at `data`, with the op's own CTAs and gaps.
    pub(super) fn new(
        gpu: &Gpu,
        kernel: &Kernel,
        program: TileProgram,
        data: Vec<u64>,
    ) -> anyhow::Result<Self> {
        let size = program.workspace();
        let pad_memory =
            gpu.alloc(pad_bytes(size.signals) as usize * program.problem.world().index())?;
        let control = gpu.alloc(control::bytes(size.counters) as usize)?;
        let fault = gpu.alloc(FAULT_BYTES as usize)?;
        for block in [&control, &fault] {
            gpu.set_words(block, 0, block.bytes() as u64 / 4, 0)?;
        }
        let pads = mock_peers::pads(&program, pad_memory.address());
        let raised = mock_peers::raised_before(&program);
        let (workers, pace) = launch_of(&program, kernel.multiprocessors());
        gpu.device().bind()?;
        let program = DeviceProgram::upload(program, kernel)?;
        let mut harness = Self {
            program,
            data,
            pads,
            pad_memory,
            control,
            fault,
            raised,
            workers,
            pace,
            epoch: Epoch::FIRST,
        };
        harness.begin_at(gpu, Epoch::FIRST)?;
        Ok(harness)
    }

    pub(super) fn program(&self) -> &TileProgram {
        self.program.program()
    }

    /// Gives the next call this epoch, whatever calls there were: no word says that it was reached.
    pub(super) fn begin_at(&mut self, gpu: &Gpu, epoch: Epoch) -> anyhow::Result<()> {
        self.epoch = epoch;
        gpu.set_words(
            &self.pad_memory,
            0,
            self.pad_memory.bytes() as u64 / 4,
            epoch.before(1).get(),
        )?;
        for pad in &self.pads {
            gpu.set_words(&self.pad_memory, pad - self.pad_memory.address(), BROKEN_BYTES / 4, 0)?;
        }
        gpu.set_words(&self.control, control::EPOCH, 1, epoch.get())
    }

    /// Raises what peers raise in the next call, in order on the stream; before every call.
    pub(super) fn raise(&self, gpu: &Gpu) -> anyhow::Result<()> {
        let own = self.pads[self.program().rank.index()] - self.pad_memory.address();
        self.raised.iter().try_for_each(|words| {
            gpu.set_words(&self.pad_memory, own + words.offset, words.count, self.epoch.get())
        })
    }

    /// Enqueues the call on a set's operands. Nothing is pushed, as there are no peers. As an op's
    /// call on its own device it begins while the launch ahead ends.
    pub(super) fn launch(
        &mut self,
        gpu: &Gpu,
        kernel: &Kernel,
        set: &OperandBlocks,
        constant_weights: bool,
    ) -> anyhow::Result<()> {
        let program = self.program.program();
        let operands = set.of_kernel(&program.problem, program.rank)?;
        let args = LaunchArgs {
            gates: None,
            activation: Activation::None,
            operands,
            result_rows: ResultRows { first: 0, count: 0 },
            data: &self.data,
            pads: &self.pads,
            scatter_buffer: self.data[program.rank.index()],
            control: self.control.address(),
            fault: self.fault.address(),
            half_stride: program.workspace().half_stride(),
            // Alone, whatever its program says of peers.
            op_hash: 0,
            sequential: false,
            deadline_ns: DEADLINE_NS,
            await_pushed: false,
            workers: self.workers,
            push: false,
            pace: self.pace,
            trace: None,
            start: match (kernel.variant().generation(), constant_weights) {
                (Generation::Portable | Generation::Ada, _) => LaunchStart::Behind,
                (Generation::Hopper, false) => LaunchStart::Early,
                (Generation::Hopper, true) => LaunchStart::WithWeights,
            },
            stream: gpu.raw_stream(),
        };
        gpu.device().bind()?;
        // SAFETY: operands have the problem's shapes, as was just checked. Data regions, pads and
        // control block are of this program's workspace and outlive the work on the one stream.
        // Peers' signals are raised before.
        unsafe { launch(kernel, &self.program, &args) }?;
        self.epoch = self.epoch.next();
        Ok(())
    }

    /// Waits for the stream and says whether every call so far has ended as it should.
    pub(super) fn check(&self, gpu: &Gpu) -> anyhow::Result<()> {
        let mut fault = [0; size_of::<FaultRecord>()];
        gpu.download(&self.fault, 0, &mut fault)?;
        let fault: FaultRecord = bytemuck::pod_read_unaligned(&fault);
        ensure!(fault.state == 0, "a call awaited a word that nobody had raised: {fault:?}");
        let mut line = [0; LINE as usize];
        gpu.download(&self.control, 0, &mut line)?;
        let epoch = bytemuck::pod_read_unaligned::<u32>(&line[control::EPOCH as usize..][..4]);
        ensure!(
            epoch == self.epoch.get(),
            "a call did not close: the next is {epoch}, and should be {}",
            self.epoch
        );
        Ok(())
    }
}
