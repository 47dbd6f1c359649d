//! A service that goes on when a rank is lost: `cargo run -p flux-tp-ops --example survive` starts
//! three processes, one of which ends in the midst of its requests. The others are told so, rebuild
//! without it, take over its part of the weights and answer every request. Fails if a number is
//! off, or a rank more is lost.
//!
//! Under a launcher that lets the others live it is one of the ranks:
//! `flux-bench launch --ranks 4 --keep-going -- survive 2 7` loses rank 2 in request 7.
#![allow(clippy::print_stdout, reason = "an example that shows what happens")]

use flux_ops::{AllGatherGemm, TensorMut, TensorRef, WorldSize, bf16};
use flux_transport::launch::{Failed, Launcher, Others};
use flux_transport::{
    Communicator, ConnectError, ControlError, Rebuild, Select, Stream, World, WorldError,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, error::Error, process};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Global rows of a request, and columns and length of the layer's weights: 1 to 4 ranks can share
/// them.
const M: usize = 24;
const N: usize = 96;
const K: usize = 64;
const REQUESTS: u64 = 12;

fn main() -> Outcome<()> {
    match World::from_env() {
        Ok(world) => serve(&world),
        Err(WorldError::NoLauncher) => launch(),
        Err(error) => Err(error.into()),
    }
}

/// This program as three ranks, which go on when one fails.
fn launch() -> Outcome<()> {
    static FAILED: AtomicU32 = AtomicU32::new(0);
    let go_on = |failed: &Failed| {
        println!(
            "launcher: rank {} is lost ({}), {} go on",
            failed.rank, failed.status, failed.others
        );
        FAILED.fetch_add(1, Ordering::Relaxed);
        Others::GoOn
    };
    let ranks = WorldSize::new(3).ok_or("3 is a world size")?;
    Launcher::new(ranks, env::current_exe()?)
        .args(env::args_os().skip(1))
        .on_failure(go_on)
        .run()?;
    match FAILED.load(Ordering::Relaxed) {
        1 => Ok(()),
        failed => Err(format!("{failed} ranks have failed, where one was to").into()),
    }
}

/// One rank: answers all requests, whoever is lost meanwhile.
fn serve(world: &World) -> Outcome<()> {
    let mut words = env::args().skip(1).map(|word| word.parse::<u64>());
    let (lost, at) = (words.next().unwrap_or(Ok(1))?, words.next().unwrap_or(Ok(5))?);
    // In the launch; a communicator that is rebuilt has numbers of its own.
    let number = world.rank();

    let mut comm = Communicator::connect_blocking(world, Select::Host)?;
    let mut layer =
        Layer { op: AllGatherGemm::builder(M, N, K).build(&comm)?, w: part(weight, N, &comm) };
    let mut request = 0;
    while request < REQUESTS {
        if (u64::from(number.get()), request) == (lost, at) {
            process::abort(); // by a signal to itself, with the others in the call
        }
        match layer.answer(request, &comm) {
            Ok(y) => {
                check(&y, request, &comm)?;
                request += 1;
            }
            Err(error) => {
                // What has broken the communicator, with what each rank was doing. Any other error
                // is not mended by a new one.
                println!("rank {number}: request {request}: {}", comm.failure().ok_or(error)?);
                comm = rebuilt(&comm)?;
                layer = Layer { op: layer.op.rebuild(&comm)?, w: part(weight, N, &comm) };
                // Some may have had their answer when others met the fault: all begin again with
                // the first request that one of them lacks.
                let lacked = comm.exchange(&request.to_le_bytes())?;
                let lacked = lacked
                    .iter()
                    .filter_map(|said| Some(u64::from_le_bytes(said.as_slice().try_into().ok()?)));
                request = lacked.min().unwrap_or(request);
                println!(
                    "rank {number}: goes on as rank {} of {} with request {request}",
                    comm.rank(),
                    comm.world_size()
                );
            }
        }
    }
    comm.barrier()?;
    println!("rank {number}: {REQUESTS} requests answered, every number checked");
    Ok(())
}

/// The communicator of those that are left. A rank that does not come is named by the error, and
/// the next attempt goes on without it.
fn rebuilt(comm: &Communicator) -> Result<Communicator, ConnectError> {
    loop {
        match comm.rebuild_blocking(Rebuild::Survivors) {
            Err(late @ ConnectError::Control(ControlError::Timeout { .. })) => {
                println!("{late}: once more");
            }
            done => return done,
        }
    }
}

/// The layer as one rank has it.
struct Layer {
    op: AllGatherGemm<bf16>,
    /// Its rows of the global weights, `[N / ranks, K]`.
    w: Vec<bf16>,
}

impl Layer {
    /// This rank's columns of what the layer makes of a request, `[M, N / ranks]`.
    fn answer(&self, request: u64, comm: &Communicator) -> Outcome<Vec<bf16>> {
        let ranks = comm.world_size().index();
        let x = part(|row, col| input(request, row, col), M, comm);
        let mut y = vec![bf16::NAN; M * N / ranks];
        self.op.forward(
            &TensorRef::host(&x, (M / ranks, K))?,
            &TensorRef::host(&self.w, (N / ranks, K))?,
            &mut TensorMut::host(&mut y, (M, N / ranks))?,
            Stream::Host,
        )?;
        Ok(y)
    }
}

/// Compares an answer with the same computed plainly: sums of so few small integers are exact, also
/// in bf16.
fn check(y: &[bf16], request: u64, comm: &Communicator) -> Outcome<()> {
    let cols = N / comm.world_size().index();
    for (at, &found) in y.iter().enumerate() {
        let (row, col) = (at / cols, comm.rank().index() * cols + at % cols);
        let exact = (0..K).map(|k| input(request, row, k) * weight(col, k)).sum::<f32>();
        if found != bf16::from_f32(exact) {
            return Err(
                format!("request {request}: y[{row}, {col}] is {found}, must be {exact}").into()
            );
        }
    }
    Ok(())
}

/// This rank's rows of a global matrix `[rows, K]`.
fn part(element: impl Fn(usize, usize) -> f32, rows: usize, comm: &Communicator) -> Vec<bf16> {
    let rows = rows / comm.world_size().index();
    let first = comm.rank().index() * rows;
    (0..rows * K).map(|at| bf16::from_f32(element(first + at / K, at % K))).collect()
}

/// An element of the input of a request: -1, 0 or 1.
fn input(request: u64, row: usize, col: usize) -> f32 {
    ((row * 5 + col * 7 + row * col + request as usize) % 3) as f32 - 1.0
}

/// An element of the weights: -1, 0 or 1.
fn weight(row: usize, col: usize) -> f32 {
    ((row * 11 + col * 3 + row * col) % 3) as f32 - 1.0
}
