//! A decode loop of one Llama layer with another batch in every step, on whatever transport is
//! there: `cargo run -p flux-tp-ops --example decode`. Every rank has one head and a part of the
//! MLP; `GemmAllReduce` adds what they have, the residual, and normalises the rows for the next
//! GEMM. Attention and SwiGLU, which an engine has kernels for, run on the host. Fails if a number
//! is off.
#![allow(clippy::print_stdout, reason = "an example that shows its result")]

#[path = "support/device.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod device;
#[path = "support/llama.rs"]
mod llama;

use device::{Device, Memory};
use flux_ops::{AllGatherGemm, GemmAllReduce};
use flux_transport::{Communicator, Options, Select, World, WorldError, device_count};
use half::bf16;
use llama::{Cache, EPS, HEAD, HIDDEN, INNER, attention, layer, matrix, normalised, swiglu};
use std::{error::Error, thread};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Sequences in each step.
const BATCHES: [usize; 6] = [5, 1, 3, 8, 2, 7];
const MAX_M: usize = 8;

fn main() -> Result<()> {
    flux_transport::probe::serve(); // first: a probe of peer access is this program again
    let worlds = match World::from_env() {
        Ok(world) => vec![world], // one process of many: torchrun, `flux-bench launch`
        // Threads: a GPU each, or on the host.
        Err(WorldError::NoLauncher) => World::local(device_count().unwrap_or(4))?,
        Err(error) => return Err(error.into()),
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || decode(&world))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
    })
}

fn decode(world: &World) -> Result<()> {
    let comm = Communicator::connect_blocking(world, Select::Auto)?;
    let (rank, ranks) = (comm.rank().index(), comm.world_size().index());
    // Column-parallel layers of replicated rows exchange nothing: their GEMMs are this rank's.
    let place = comm.device().ordinal();
    let select = if place.is_some() { Select::Auto } else { Select::Host };
    let alone = Communicator::connect_blocking(
        &World::single(),
        Options { device: place, ..Options::from(select) },
    )?;

    // Built once for all batches; a call takes its rows from its operands.
    let qkv_op = AllGatherGemm::<bf16>::builder(MAX_M, 3 * HEAD, HIDDEN).build(&alone)?;
    let up_op = AllGatherGemm::<bf16>::builder(MAX_M, 2 * INNER, HIDDEN).build(&alone)?;
    let summed = |k: usize| {
        GemmAllReduce::<bf16>::builder(MAX_M, HIDDEN, k * ranks)
            .residual(true)
            .rms_norm(EPS)
            .build(&comm)
    };
    let (out_op, down_op) = (summed(HEAD)?, summed(INNER)?);

    let device = Device::of(&comm)?;
    let weight = |which, rows, cols| device.put(narrow(&matrix(which, rank, rows, cols)));
    let (qkv_w, out_w) = (weight(0, 3 * HEAD, HIDDEN)?, weight(1, HIDDEN, HEAD)?);
    let (up_w, down_w) = (weight(2, 2 * INNER, HIDDEN)?, weight(3, HIDDEN, INNER)?);
    let gain = device.put(vec![bf16::ONE; HIDDEN])?;
    let mut caches = vec![Cache::default(); MAX_M];
    let mut exact = vec![vec![Cache::default(); MAX_M]; ranks];

    for (step, m) in BATCHES.into_iter().enumerate() {
        let tokens = matrix(4 + step, 0, m, HIDDEN);
        let mut state = Hidden {
            m,
            sums: device.put(narrow(&tokens))?,
            rows: device.put(narrow(&normalised(&tokens)))?,
        };
        let qkv = multiply(&device, &qkv_op, &state, &qkv_w, 3 * HEAD)?;
        let attended = device.put(narrow(&attention(&qkv, &mut caches)))?;
        add_and_norm(&device, &out_op, &attended, &out_w, HEAD, &gain, &mut state)?;
        let up = multiply(&device, &up_op, &state, &up_w, 2 * INNER)?;
        let gated = device.put(narrow(&swiglu(&up)))?;
        add_and_norm(&device, &down_op, &gated, &down_w, INNER, &gain, &mut state)?;

        let (hidden, rows) = (wide(&device.get(&state.sums)?), wide(&device.get(&state.rows)?));
        down_op.status()?; // the first fault of any call, from the device too
        let expected = layer(&tokens, &mut exact);
        check(step, &hidden, &expected)?;
        check(step, &rows, &normalised(&expected))?;
    }
    if rank == 0 {
        println!("{}", down_op.explain());
    }
    println!("rank {rank}: {} steps checked", BATCHES.len());
    Ok(())
}

/// The hidden states of `m` tokens, on every rank, and their RMSNorm.
struct Hidden {
    m: usize,
    sums: Memory<bf16>,
    rows: Memory<bf16>,
}

/// `rows w^T` of this rank alone.
fn multiply(
    device: &Device,
    op: &AllGatherGemm<bf16>,
    state: &Hidden,
    w: &Memory<bf16>,
    n: usize,
) -> Result<Vec<f64>> {
    let m = state.m;
    let mut y = device.put(vec![bf16::NAN; m * n])?;
    let (x, w) = (device.view(&state.rows, (m, HIDDEN))?, device.view(w, (n, HIDDEN))?);
    op.forward(&x, &w, &mut device.view_mut(&mut y, (m, n))?, device.stream())?;
    Ok(wide(&device.get(&y)?))
}

/// `sums += x w^T` over all ranks, and `rows` the RMSNorm of it.
fn add_and_norm(
    device: &Device,
    op: &GemmAllReduce<bf16>,
    x: &Memory<bf16>,
    w: &Memory<bf16>,
    k: usize,
    gain: &Memory<bf16>,
    state: &mut Hidden,
) -> Result<()> {
    let m = state.m;
    let (x, w, gain) =
        (device.view(x, (m, k))?, device.view(w, (HIDDEN, k))?, device.view(gain, (HIDDEN,))?);
    let mut rows = device.view_mut(&mut state.rows, (m, HIDDEN))?;
    let mut hidden = device.view_mut(&mut state.sums, (m, HIDDEN))?;
    let call = op.call(&x).weight(&w, &mut hidden).residual_in_y().norm(&gain, &mut rows);
    Ok(call.on(device.stream())?)
}

/// Some ten roundings of bf16 may differ, each of 2^-8 at most.
fn check(step: usize, found: &[f64], expected: &[f64]) -> Result<()> {
    let largest = expected.iter().fold(0.0, |largest: f64, v| largest.max(v.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    if off.is_nan() || off > 0.03 * largest {
        Err(format!("step {step}: off by {off} of {largest}").into())
    } else {
        Ok(())
    }
}

fn narrow(values: &[f64]) -> Vec<bf16> {
    values.iter().copied().map(bf16::from_f64).collect()
}

fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|v| v.to_f64()).collect()
}
