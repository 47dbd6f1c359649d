//! A tensor-parallel MLP, `y = gelu(x w1^T + b1) w2^T + b2`, on whatever transport is there:
//! `cargo run -p flux-tp-ops --example tp_mlp`. Tokens are split over the ranks before and after,
//! the inner features in between. Fails if a number is off.
#![allow(clippy::print_stdout, reason = "an example that shows its result")]

#[path = "support/device.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod device;

use device::Device;
use flux_ops::{Activation, AllGatherGemm, DType, GemmReduceScatter};
use flux_transport::{Communicator, Select, World, WorldError, device_count};
use half::bf16;
use std::{cmp::Ordering, error::Error, thread};

const FEATURES: usize = 128;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    flux_transport::probe::serve(); // first: a probe of peer access is this program again
    let worlds = match World::from_env() {
        Ok(world) => vec![world], // one process of many: torchrun, `flux-bench launch`
        // Threads: a GPU each, or on the host.
        Err(WorldError::NoLauncher) => World::local(device_count().unwrap_or(4))?,
        Err(error) => return Err(error.into()),
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || mlp(&world))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
    })
}

fn mlp(world: &World) -> Result<(), Box<dyn Error + Send + Sync>> {
    let comm = Communicator::connect_blocking(world, Select::Auto)?;
    let (rank, ranks) = (comm.rank().index(), comm.world_size().index());
    let (m_shard, inner_shard) = (32, 64);
    let (m, inner) = (m_shard * ranks, inner_shard * ranks);

    // The layers, built once; both use the communicator's one workspace.
    let up = AllGatherGemm::<bf16>::builder(m, inner, FEATURES)
        .bias(true)
        .activation(Activation::Gelu)
        .build(&comm)?;
    let down = GemmReduceScatter::<bf16>::builder(m, FEATURES, inner).bias(true).build(&comm)?;

    // This rank's part of the global x [m, FEATURES], w1 [inner, FEATURES], b1 [inner] and w2
    // [FEATURES, inner], and all of b2 [FEATURES].
    let part = |tensor, rows, cols, row, col| -> Vec<bf16> {
        (0..rows * cols)
            .map(|i| bf16::from_f64(element(tensor, row + i / cols, col + i % cols)))
            .collect()
    };
    let device = Device::of(&comm)?;
    let x = device.put(part(0, m_shard, FEATURES, rank * m_shard, 0))?;
    let w1 = device.put(part(1, inner_shard, FEATURES, rank * inner_shard, 0))?;
    let w2 = device.put(part(2, FEATURES, inner_shard, 0, rank * inner_shard))?;
    let (b1, b2) = (
        device.put(part(3, 1, inner_shard, 0, rank * inner_shard))?,
        device.put(part(4, 1, FEATURES, 0, 0))?,
    );
    let (mut h, mut y) = (
        device.put(vec![bf16::NAN; m * inner_shard])?,
        device.put(vec![bf16::NAN; m_shard * FEATURES])?,
    );

    let (x, w1) =
        (device.view(&x, (m_shard, FEATURES))?, device.view(&w1, (inner_shard, FEATURES))?);
    let (b1, b2) = (device.view(&b1, (inner_shard,))?, device.view(&b2, (FEATURES,))?);
    up.call(&x)
        .weight(&w1, &mut device.view_mut(&mut h, (m, inner_shard))?)
        .bias(&b1)
        .on(device.stream())?;
    let (h, w2) = (device.view(&h, (m, inner_shard))?, device.view(&w2, (FEATURES, inner_shard))?);
    down.call(&h)
        .weight(&w2, &mut device.view_mut(&mut y, (m_shard, FEATURES))?)
        .bias(&b2)
        .on(device.stream())?;
    let y = device.get(&y)?;
    up.status()?; // the first fault of any call, from the device too

    check(&y, rank * m_shard, inner)?;
    if rank == 0 {
        println!("{}\n{}", up.explain(), down.explain());
    }
    println!("rank {rank}: {} numbers checked", y.len());
    Ok(())
}

/// Compares rows of `y`, from global row `first` on, with the same in fp64 on one thread. Roundings
/// that may differ: the activated inner features, the partial sums that travel, the output; fp32
/// adds less than a twentieth.
fn check(y: &[bf16], first: usize, inner: usize) -> Result<(), String> {
    let u = 1.05 * DType::Bf16.unit_roundoff();
    for (i, row) in y.chunks_exact(FEATURES).enumerate().map(|(i, row)| (first + i, row)) {
        let dot = |f| (0..FEATURES).map(|k| element(0, i, k) * element(1, f, k)).sum::<f64>();
        let h: Vec<f64> = (0..inner).map(|f| gelu(dot(f) + element(3, 0, f))).collect();
        for (j, found) in row.iter().enumerate() {
            let exact = h.iter().enumerate().map(|(f, h)| h * element(2, j, f)).sum::<f64>()
                + element(4, 0, j);
            let parts: f64 =
                h.iter().enumerate().map(|(f, h)| 2.0 * (h * element(2, j, f)).abs()).sum();
            if (found.to_f64() - exact)
                .abs()
                .partial_cmp(&(u * (exact.abs() + parts)))
                .is_none_or(Ordering::is_gt)
            {
                return Err(format!("y[{i}, {j}] is {found}, must be {exact}"));
            }
        }
    }
    Ok(())
}

/// An element of a global tensor, between -1 and 1 and exact in bf16.
fn element(tensor: usize, row: usize, col: usize) -> f64 {
    ((row * 37 + col * 101 + tensor * 53 + row * col * 7) % 129) as f64 / 64.0 - 1.0
}

fn gelu(v: f64) -> f64 {
    0.5 * v * (1.0 + (0.797_884_560_802_865_4 * (v + 0.044_715 * v.powi(3))).tanh())
}
