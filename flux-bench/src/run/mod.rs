//! `flux-bench run`: an op on operands from a file, sharded over ranks as in a model.
//!
//! Invariant: the output file is there whole, or not at all with an error. The input file is not
//! changed.

mod input;
mod output;
mod quantized;
mod scaled;

use input::{Input, Wanted};
use output::{Extents, Output, Tensor};
use quantized::with_scales;

use crate::harness::data::Window;
use crate::harness::epilogue::problem_with;
use crate::harness::scaled::bytes_behind_rows;
use crate::harness::{
    EpilogueArgs, EpilogueSpec, NoMemory, Norm, RankContext, bias_window, build_with, elements,
    ranks, result_window, room, w_window, x_window, y_window,
};
use crate::plan::Overrides;
use crate::{atomic_file, end, launch, machine, out, shapes};
use anyhow::ensure;
use flux_core::{OpKind, Problem, SumsTo};
use flux_kernels::{Element, with_elements};
use flux_ops::GateLayout;
use flux_transport::{Select, World};
use std::ops::Range;
use std::path::PathBuf;

/// Memory that has to be left when a rank has its operands: stacks of the CPU executor's threads
/// and a block of the output.
const SPARE: usize = 8 << 20;

/// Arguments of `flux-bench run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ag_gemm, gemm_rs or gemm_ar
    #[arg(value_parser = crate::shapes::parse_op)]
    pub op: OpKind,
    /// Ranks, as threads of this process
    #[arg(long, visible_alias = "tp", default_value_t = 1)]
    pub ranks: u32,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// What becomes of the sums
    #[command(flatten)]
    pub epilogue: EpilogueArgs,
    /// Make the bits of a row independent of the rows beside it
    #[arg(long)]
    pub batch_invariant: bool,
    /// Safetensors file with the global `x[m, k]`, `w[n, k]` and, optionally, `bias[n]`, and
    /// `residual[m, n]` for gemm_rs and gemm_ar; for --norm with `gain[n]`. All BF16 or all F16.
    /// `w` may be F8_E4M3 with `weight_scale` of one element, or of one for each row, or
    /// `weight_scale_inv` of one for each 128 x 128. `x` is then F8_E4M3 with `input_scale`, or of
    /// 16 bits and quantised: with a scale that is there, else with one for each row or 1 x 128. Of
    /// gates and ups the first half of the rows of `w` are gates, or of those that are
    /// interleaved every other
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Safetensors file for `y` [m, n], with gates [m, n/2], and with --norm for `y_norm`; replaced
    /// where it is there; not that of --input
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Reads, computes, assembles, writes.
pub fn run(args: &Args) -> anyhow::Result<()> {
    launch::refuse("run")?;
    atomic_file::check(&args.output)?;
    let wanted = Wanted { residual: args.op.reduces(), gain: args.epilogue.norm.is_some() };
    let input = Input::read(&args.input, wanted)?;
    ensure!(
        !atomic_file::same_file(&args.input, &args.output)?,
        "--output {} is the file of --input, whose operands it would replace: name another",
        args.output.display()
    );
    let world = shapes::world_of("--ranks", args.ranks)?;
    let epilogue = args.epilogue.spec(input.bias().is_some(), input.residual().is_some());
    let problem = Problem::new(args.op, input.m, input.n, input.k, input.numerics, world)?;
    let problem = problem_with(epilogue, problem)?;
    machine::uses_gpus(args.transport)?;
    if !input.unused.is_empty() {
        let names: Vec<_> =
            input.unused.iter().map(|name| name.escape_debug().to_string()).collect();
        let (file, names) = (args.input.display(), names.join(", "));
        end::say(&format!("{file} has tensors that are not used: {names}"));
    }
    let cols = if epilogue.gates.is_some() { input.n / 2 } else { input.n };
    let normed = epilogue.rms_norm.is_some();
    let extents = Extents { rows: input.m, cols, dtype: input.numerics.output, normed };
    let output = Output::create(&args.output, extents)?;
    with_elements!(
        input.numerics,
        X,
        Y,
        compute::<X, Y>(&problem, args, epilogue, &input, &output)
    )?;
    output.commit()?;
    out::line(&format_args!(
        "{problem}: y [{}, {cols}]{} written to {}",
        problem.m(),
        if normed { " and y_norm" } else { "" },
        args.output.display()
    ));
    Ok(())
}

/// Runs the op on all ranks, each of which writes its part of `y`.
fn compute<X: Element, Y: Element>(
    problem: &Problem,
    args: &Args,
    epilogue: EpilogueSpec,
    input: &Input,
    output: &Output,
) -> anyhow::Result<()> {
    let (n, k) = (problem.n() as usize, problem.k() as usize);
    let body = |world: &World| {
        let ctx = RankContext::connect(world, args.transport)?;
        let overrides = Overrides { batch_invariant: args.batch_invariant, ..Overrides::default() };
        let op = build_with(problem, ctx.comm(), overrides, epilogue)?;
        let mut set = ctx.operand_set_with::<X, Y>(problem, epilogue)?;
        let rank = ctx.rank();
        let of_x = x_window(problem, rank);
        let (x, row) = input.x();
        let mut x = cut::<X>(x, row, [of_x])?;
        let window = w_window(problem, rank);
        let own = parts(window.row0..window.row0 + window.rows, epilogue.gates, problem.n());
        let rows =
            |rows: &Range<u32>| Window { row0: rows.start, rows: rows.end - rows.start, ..window };
        if let Some(scales) = &input.scales {
            let list = scales.of_x(of_x);
            if let Some(to) = &mut set.scale_x {
                ctx.upload(to, &list)?;
            } else {
                x = with_scales(&x, of_x.cols as usize, &list, bytes_behind_rows(problem))?;
            }
            ctx.upload(&mut set.scales_w[0], &scales.of_w(own.iter().map(rows)))?;
        }
        ctx.upload(&mut set.x, &x)?;
        drop(x);
        let weight = &mut set.weights[0];
        ctx.upload(&mut weight.w, &cut::<X>(input.w(), k, own.iter().map(rows))?)?;
        if let (Some(to), Some(bias)) = (&mut weight.bias, input.bias()) {
            let window = bias_window(problem, rank);
            let own = parts(window.col0..window.col0 + window.cols, epilogue.gates, problem.n());
            let cols = |cols: &Range<u32>| Window {
                col0: cols.start,
                cols: cols.end - cols.start,
                ..window
            };
            ctx.upload(to, &cut::<Y>(bias, n, own.iter().map(cols))?)?;
        }
        if let (Some(to), Some(residual)) = (&mut set.residual, input.residual()) {
            ctx.upload(to, &cut::<Y>(residual, n, [y_window(problem, rank)])?)?;
        }
        if let (Some(Norm { gain: to, .. }), Some(gain)) = (&mut set.norm, input.gain()) {
            ctx.upload(to, &cut::<Y>(gain, n, [bias_window(problem, rank)])?)?;
        }
        // Nobody checks what is had in small pieces from here on.
        drop(room::<u8>(SPARE)?);
        ctx.forward(&op, &mut set)?;
        ctx.sync(&op)?;
        // Every rank of a GEMM-AllReduce has all of it.
        if problem.op().sums_to() == SumsTo::All && ctx.rank().get() > 0 {
            return Ok(());
        }
        let window = result_window(problem, epilogue.gates, rank);
        output.write(&ctx, Tensor::Y, &set.weights[0].y, window)?;
        match &set.norm {
            Some(norm) => output.write(&ctx, Tensor::YNorm, &norm.y_norm, window),
            None => Ok(()),
        }
    };
    ranks::on_threads(World::local(problem.world().get())?, body).map(drop)
}

/// The rows of `w` that a rank has for these columns of the product. All gates come before their
/// ups in a file, as they do on a rank.
fn parts(columns: Range<u32>, gates: Option<GateLayout>, n: u32) -> Vec<Range<u32>> {
    match gates {
        Some(GateLayout::Concatenated) => {
            let (begin, end) = (columns.start / 2, columns.end / 2);
            vec![begin..end, n / 2 + begin..n / 2 + end]
        }
        None | Some(GateLayout::Interleaved) => vec![columns],
    }
}

/// The elements of windows, dense, one window after the other, out of the bytes of a matrix with so
/// many elements from a row to the next.
fn cut<T: Element>(
    from: &[u8],
    row: usize,
    windows: impl IntoIterator<Item = Window> + Clone,
) -> Result<Vec<T>, NoMemory> {
    let mut part = room(windows.clone().into_iter().map(elements).sum())?;
    for window in windows {
        let (first, bytes) =
            (window.col0 as usize * size_of::<T>(), window.cols as usize * size_of::<T>());
        let rows = from.chunks_exact(row * size_of::<T>()).skip(window.row0 as usize);
        for row in rows.take(window.rows as usize) {
            let begin = part.len();
            part.resize(begin + window.cols as usize, T::from_f32(0.0));
            bytemuck::cast_slice_mut(&mut part[begin..]).copy_from_slice(&row[first..][..bytes]);
        }
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
            assert_eq!(cut::<bf16>(bytes, 10, [window]).unwrap(), wanted);
        }
    }
}
