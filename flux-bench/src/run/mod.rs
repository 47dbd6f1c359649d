//! `flux-bench run`: an op on operands from a file, sharded over ranks as in a model.
//!
//! Invariant: the output file is there whole, or not at all with an error. The input file is not
//! changed.

mod input;

use input::Input;

use crate::atomic_file;
use crate::end;
use crate::harness::data::Window;
use crate::harness::{EpilogueSpec, FusedOp, RankContext, bias_window, elements, ranks, room, w_window, x_window, y_window};
use crate::launch;
use crate::machine;
use crate::out;
use crate::plan::Overrides;
use anyhow::{Context, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use flux_core::{DType, OpKind, Problem, WorldSize};
use flux_kernels::Element;
use flux_ops::Activation;
use flux_transport::{Communicator, Select, World};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::PathBuf;

/// Arguments of `flux-bench run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ag-gemm or gemm-rs
    #[arg(value_parser = crate::shapes::parse_op)]
    pub op: OpKind,
    /// Ranks, as threads of this process
    #[arg(long, default_value_t = 1)]
    pub ranks: u32,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Applied to `y` before it is rounded (ag-gemm)
    #[arg(long, default_value = "none", value_parser = activations())]
    pub activation: Activation,
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
    PossibleValuesParser::new(Activation::ALL.map(Activation::name)).try_map(|word| word.parse::<Activation>())
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
    let world =
        WorldSize::new(args.ranks).with_context(|| format!("--ranks {} is outside 1 to {}", args.ranks, flux_core::rank::MAX_WORLD))?;
    let problem = Problem::new(args.op, input.m, input.n, input.k, input.dtype, world)?;
    machine::uses_gpus(args.transport)?;
    if !input.unused.is_empty() {
        end::say(&format!(
            "{} has tensors that are not used: {}",
            args.input.display(),
            input.unused.iter().map(|name| name.escape_debug().to_string()).collect::<Vec<_>>().join(", ")
        ));
    }
    let (y, dtype) = match input.dtype {
        DType::Bf16 => (compute::<bf16>(&problem, args, &input)?, Dtype::BF16),
        DType::F16 => (compute::<f16>(&problem, args, &input)?, Dtype::F16),
    };
    drop(input);
    let view = TensorView::new(dtype, vec![problem.m() as usize, problem.n() as usize], &y)?;
    let file = safetensors::serialize([("y", view)], None)?;
    atomic_file::write(&args.output, |w| w.write_all(&file))?;
    out::line(&format_args!("{problem}: y [{}, {}] written to {}", problem.m(), problem.n(), args.output.display()));
    Ok(())
}

/// The global `y`, as bytes.
fn compute<T: Element>(problem: &Problem, args: &Args, input: &Input) -> anyhow::Result<Vec<u8>> {
    let (x, w, bias) = (input.x::<T>()?, input.w::<T>()?, input.bias::<T>()?);
    let epilogue = EpilogueSpec { bias: bias.is_some(), activation: args.activation };
    let k = problem.k() as usize;
    let body = |world: &World| {
        let comm = Communicator::connect_blocking(world, machine::options(args.transport, world.local_rank(), 1))?;
        let ctx = RankContext::new(comm)?;
        let op = FusedOp::<T>::build_with(problem, ctx.comm(), Overrides::default(), epilogue)?;
        let mut set = ctx.operand_set_with(problem, epilogue)?;
        ctx.upload(&mut set.x, &cut(&x, k, x_window(problem, ctx.rank()))?)?;
        ctx.upload(&mut set.w, &cut(&w, k, w_window(problem, ctx.rank()))?)?;
        if let (Some(own), Some(bias)) = (&mut set.bias, &bias) {
            ctx.upload(own, &cut(bias, bias.len(), bias_window(problem, ctx.rank()))?)?;
        }
        ctx.forward(&op, &mut set)?;
        ctx.sync(&op)?;
        ctx.download(&set.y)
    };
    let parts = ranks::on_threads(World::local(problem.world().get())?, body)?;
    let n = problem.n() as usize;
    let mut y = room(problem.m() as usize * n)?;
    y.resize(problem.m() as usize * n, T::from_f32(0.0));
    for (rank, part) in problem.world().ranks().zip(&parts) {
        paste(&mut y, n, y_window(problem, rank), part);
    }
    Ok(bytemuck::cast_slice(&y).to_vec())
}

/// A window's elements, dense, out of a matrix of `cols` columns.
fn cut<T: Copy>(from: &[T], cols: usize, window: Window) -> anyhow::Result<Vec<T>> {
    let mut part = room(elements(window))?;
    for row in from.chunks_exact(cols).skip(window.row0 as usize).take(window.rows as usize) {
        part.extend_from_slice(&row[window.col0 as usize..][..window.cols as usize]);
    }
    Ok(part)
}

/// The inverse of [`cut`].
fn paste<T: Copy>(to: &mut [T], cols: usize, window: Window, part: &[T]) {
    let rows = to.chunks_exact_mut(cols).skip(window.row0 as usize);
    for (row, line) in rows.zip(part.chunks_exact(window.cols as usize)) {
        row[window.col0 as usize..][..window.cols as usize].copy_from_slice(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_can_be_pasted_back() {
        let from: Vec<u32> = (0..6 * 10).collect();
        let mut to = vec![0; 60];
        for (row0, col0) in [(0, 0), (0, 5), (3, 0), (3, 5)] {
            let window = Window { row0, col0, rows: 3, cols: 5 };
            paste(&mut to, 10, window, &cut(&from, 10, window).unwrap());
        }
        assert_eq!(to, from);
    }
}
