//! `flux-bench run`: an op on operands from a file, sharded over ranks as in a model.
//!
//! Invariant: the output file is there whole, or not at all with an error. The input file is not
//! changed.

mod input;
mod output;

use input::Input;
use output::Output;

use crate::atomic_file;
use crate::end;
use crate::harness::data::Window;
use crate::harness::{
    EpilogueSpec, RankContext, bias_window, build_with, elements, ranks, room, w_window, x_window,
    y_window,
};
use crate::launch;
use crate::machine;
use crate::out;
use crate::plan::Overrides;
use anyhow::{Context, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use flux_core::{OpKind, Problem, SumsTo, WorldSize};
use flux_kernels::{Element, with_element};
use flux_ops::Activation;
use flux_transport::{Communicator, Select, World};
use std::path::PathBuf;

/// Memory that has to be left when a rank has its operands: stacks of the CPU executor's threads
/// and a block of the output.
const SPARE: usize = 8 << 20;

/// Arguments of `flux-bench run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ag_gemm, gemm_rs or gemm_ar, without residual, norm, gates and fp32 partial sums
    #[arg(value_parser = crate::shapes::parse_op)]
    pub op: OpKind,
    /// Ranks, as threads of this process
    #[arg(long, visible_alias = "tp", default_value_t = 1)]
    pub ranks: u32,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Applied to `y` before it is rounded (ag_gemm)
    #[arg(long, default_value = "none", value_parser = activations())]
    pub activation: Activation,
    /// Make the bits of a row independent of the rows beside it
    #[arg(long)]
    pub batch_invariant: bool,
    /// Safetensors file with the global `x` [m, k], `w` [n, k] and, optionally, `bias` `[n]`, all
    /// BF16 or all F16
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Safetensors file for `y` [m, n], replaced where it is there; not that of --input
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Reads one of the activations, which the help lists.
fn activations() -> impl TypedValueParser<Value = Activation> {
    PossibleValuesParser::new(Activation::ALL.map(Activation::name))
        .try_map(|word| word.parse::<Activation>())
}

/// Reads, computes, assembles, writes.
pub fn run(args: &Args) -> anyhow::Result<()> {
    launch::refuse("run")?;
    atomic_file::check(&args.output)?;
    let input = Input::read(&args.input)?;
    ensure!(
        !atomic_file::same_file(&args.input, &args.output)?,
        "--output {} is the file of --input, whose operands it would replace: name another",
        args.output.display()
    );
    let world = WorldSize::new(args.ranks).with_context(|| {
        format!("--ranks {} is outside 1 to {}", args.ranks, flux_core::rank::MAX_WORLD)
    })?;
    let problem = Problem::new(args.op, input.m, input.n, input.k, input.dtype, world)?;
    machine::uses_gpus(args.transport)?;
    if !input.unused.is_empty() {
        end::say(&format!(
            "{} has tensors that are not used: {}",
            args.input.display(),
            input
                .unused
                .iter()
                .map(|name| name.escape_debug().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        ));
    }
    let output = Output::create(&args.output, &problem)?;
    with_element!(input.dtype, T, compute::<T>(&problem, args, &input, &output))?;
    output.commit()?;
    out::line(&format_args!(
        "{problem}: y [{}, {}] written to {}",
        problem.m(),
        problem.n(),
        args.output.display()
    ));
    Ok(())
}

/// Runs the op on all ranks, each of which writes its part of `y`.
fn compute<T: Element>(
    problem: &Problem,
    args: &Args,
    input: &Input,
    output: &Output,
) -> anyhow::Result<()> {
    let epilogue = EpilogueSpec {
        bias: input.bias().is_some(),
        activation: args.activation,
        ..EpilogueSpec::default()
    };
    let k = problem.k() as usize;
    let body = |world: &World| {
        let comm = Communicator::connect_blocking(
            world,
            machine::options(args.transport, world.local_rank(), 1),
        )?;
        let ctx = RankContext::new(comm)?;
        let overrides = Overrides { batch_invariant: args.batch_invariant, ..Overrides::default() };
        let op = build_with(problem, ctx.comm(), overrides, epilogue)?;
        let mut set = ctx.operand_set_with(problem, epilogue)?;
        ctx.upload(&mut set.x, &cut::<T>(input.x(), k, x_window(problem, ctx.rank()))?)?;
        ctx.upload(&mut set.w, &cut::<T>(input.w(), k, w_window(problem, ctx.rank()))?)?;
        if let (Some(own), Some(bias)) = (&mut set.bias, input.bias()) {
            ctx.upload(
                own,
                &cut::<T>(bias, problem.n() as usize, bias_window(problem, ctx.rank()))?,
            )?;
        }
        // Nobody checks what is had in small pieces from here on.
        drop(room::<u8>(SPARE)?);
        ctx.forward(&op, &mut set)?;
        ctx.sync(&op)?;
        // Every rank of a GEMM-AllReduce has all of it.
        if problem.op().sums_to() == SumsTo::All && ctx.rank().get() > 0 {
            return Ok(());
        }
        output.write(&ctx, &set.y, y_window(problem, ctx.rank()))
    };
    ranks::on_threads(World::local(problem.world().get())?, body).map(drop)
}

/// A window's elements, dense, out of the bytes of a matrix of `cols` columns.
fn cut<T: Element>(from: &[u8], cols: usize, window: Window) -> anyhow::Result<Vec<T>> {
    let (first, bytes) =
        (window.col0 as usize * size_of::<T>(), window.cols as usize * size_of::<T>());
    let mut part = room(elements(window))?;
    part.resize(elements(window), T::from_f32(0.0));
    let rows = from.chunks_exact(cols * size_of::<T>()).skip(window.row0 as usize);
    for (line, row) in part.chunks_exact_mut(window.cols as usize).zip(rows) {
        bytemuck::cast_slice_mut(line).copy_from_slice(&row[first..][..bytes]);
    }
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn a_window_is_cut_from_bytes_on_any_border() {
        let matrix: Vec<u8> =
            (0..6 * 10u8).flat_map(|at| bf16::from_f32(at.into()).to_le_bytes()).collect();
        let off = [&[0], &matrix[..]].concat();
        let window = Window { row0: 3, col0: 5, rows: 2, cols: 5 };
        let wanted: Vec<bf16> =
            [35, 36, 37, 38, 39, 45, 46, 47, 48, 49u8].map(|at| bf16::from_f32(at.into())).into();
        for bytes in [&matrix[..], &off[1..]] {
            assert_eq!(cut::<bf16>(bytes, 10, window).unwrap(), wanted);
        }
    }
}
