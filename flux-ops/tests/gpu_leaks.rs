//! Communicators that come and go, each with an op and a call, leave nothing behind, on GPUs and on the host. A binary of its own with one test: others would
//! change what is counted.
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::suite::{self, call};
use common::{AnyOp, Case, Machine, OPS, Plan, Values};
use flux_transport::cuda::CudaDevice;
use flux_transport::nccl;
use half::bf16;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
/// Cycles before anything is counted: they make what the driver, NCCL and the allocator keep.
const FIRST: u32 = 10;
/// How long the system may take to forget threads that have ended, and NCCL to end a communicator's.
const SETTLES: Duration = Duration::from_secs(20);
/// What the driver may keep of a device's memory, which it takes in blocks of 2 MiB and, for what is freed in a stream's order, of 32. A leak of one allocation a
/// cycle is 200 MiB and more.
const SLACK: u64 = 64 << 20;

#[test]
fn communicators_with_ops_leave_nothing_behind() {
    let run = |found, cycles| {
        common::where_found::run("gpu_leaks", found, |machine| {
            println!("{machine:?}: {cycles} cycles in {:.1} s", come_and_go(machine, cycles).as_secs_f64());
        });
    };
    let nccl = |count| nccl::available().map(|_| Machine::Messages(count)).map_err(|why| why.to_string());
    run(Ok(Machine::Host), 100);
    run(common::gpus::count().map(Machine::Gpus), 1000);
    run(several().map(Machine::Staged), 100);
    run(several().and_then(nccl), 100);
}

/// GPUs of which each rank has its own.
fn several() -> Result<u32, String> {
    common::gpus::count().and_then(|count| if count >= RANKS { Ok(count) } else { Err(format!("{RANKS} GPUs needed, {count} here")) })
}

/// How long so many cycles take, after which there is no more than before.
fn come_and_go(machine: Machine, cycles: u32) -> Duration {
    let cases = OPS.map(|op| Case::<bf16>::new(op, suite::ragged(machine, op, RANKS), RANKS, Values::Integers, 61));
    let expected = cases.each_ref().map(|case| case.expected_on(machine));
    // By turns with either op. Returns the ranks' devices.
    let cycle = |number: u32| {
        let at = number as usize % OPS.len();
        machine.run(RANKS, suite::defaults, |node| {
            let op = AnyOp::of(&cases[at], Plan::default(), node);
            let y = call(&op, &cases[at], node).unwrap();
            cases[at].assert_equal(&expected[at], node.rank, &y, &format!("cycle {number}"));
            op.status().unwrap();
            node.comm.device().ordinal()
        })
    };
    // They keep the contexts, which would go with the last communicator.
    let devices: Vec<CudaDevice> = cycle(0).into_iter().flatten().map(|ordinal| CudaDevice::open(ordinal).unwrap()).collect();
    (1..FIRST).for_each(|number| drop(cycle(number)));
    let before = Held::now(&devices);
    let began = Instant::now();
    (0..cycles).for_each(|number| drop(cycle(number)));
    let took = began.elapsed();
    let until = Instant::now() + SETTLES;
    loop {
        let after = Held::now(&devices);
        let beyond = after.beyond(&before, cycles);
        if beyond.is_empty() {
            return took;
        }
        assert!(Instant::now() < until, "{machine:?}, {cycles} cycles: {}; there were {before:?}, there are {after:?}", beyond.join("; "));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What this process holds.
#[derive(Debug)]
struct Held {
    /// Descriptors, threads and shared mappings, by kind: what they are called, without the numbers that each has anew.
    kinds: BTreeMap<String, usize>,
    mappings: usize,
    /// Free bytes of each device.
    free: Vec<u64>,
}

impl Held {
    fn now(devices: &[CudaDevice]) -> Self {
        let free = devices.iter().map(|device| {
            // What was freed in a stream's order goes back at this.
            device.synchronize().unwrap();
            device.memory().unwrap().0
        });
        let free = free.collect();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut kinds = BTreeMap::new();
        // Who goes between the listing and the look is not held any more.
        let descriptors =
            entries("/proc/self/fd").filter_map(|path| Some(format!("descriptor of {}", std::fs::read_link(path).ok()?.display())));
        let threads = entries("/proc/self/task")
            .filter_map(|path| Some(format!("thread {}", std::fs::read_to_string(path.join("comm")).ok()?.trim_end())));
        for held in descriptors.chain(threads).chain(maps.lines().filter_map(shared)) {
            *kinds.entry(held.chars().filter(|c| !c.is_ascii_digit()).collect()).or_default() += 1;
        }
        Self { kinds, mappings: maps.lines().count(), free }
    }

    /// What there is more of than before, by more than may be kept.
    fn beyond(&self, before: &Self, cycles: u32) -> Vec<String> {
        let had = |kind: &str| before.kinds.get(kind).copied().unwrap_or(0);
        let mut beyond: Vec<String> = self
            .kinds
            .iter()
            .filter(|&(kind, &count)| count > had(kind))
            .map(|(kind, count)| format!("{kind}: {count}, {} before", had(kind)))
            .collect();
        // The allocator's come and go; one of a rank a cycle would be four times as many.
        if self.mappings > before.mappings + cycles as usize / 2 {
            beyond.push(format!("mappings: {}, {} before", self.mappings, before.mappings));
        }
        let taken = self.free.iter().zip(&before.free).enumerate().filter(|&(_, (after, before))| after + SLACK < *before);
        beyond.extend(taken.map(|(rank, (after, before))| format!("rank {rank}'s device: {after} bytes free, {before} before")));
        beyond
    }
}

fn entries(folder: &str) -> impl Iterator<Item = std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

/// A mapping of memory that others have too. Those of the driver's devices come and go with its own memory.
fn shared(line: &str) -> Option<String> {
    let mut fields = line.split_ascii_whitespace();
    let shared = fields.nth(1)?.ends_with('s');
    let path = line.find('/').map(|at| &line[at..])?;
    (shared && !path.starts_with("/dev/nvidia")).then(|| format!("mapping of {path}"))
}
