//! Communicators that come and go, each with an op and a call, leave nothing behind, on GPUs and on
//! the host. A binary of its own with one test: others would change what is counted.
//!
//! Ranks are threads with a GPU each, or share the only one over nvlink. As processes of a launch
//! (`common/launched.rs`) each counts what it holds, and all count their devices' memory together.
#![allow(
    clippy::unwrap_used,
    reason = "clippy knows test functions, not the functions that they call"
)]

mod common;

use common::lateness::AMPLE;
use common::launched::{launched, places};
use common::suite::{self, call};
use common::{Case, Check, Machine, Meeting, OpOptions, Values, build_case, skipped};
use flux_cuda::CudaDevice;
use flux_transport::internal::nccl;
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Of ranks that are threads.
const RANKS: u32 = 2;
/// Cycles before anything is counted: they make what the driver, NCCL and the allocator keep.
const FIRST: u32 = 10;
/// How long one machine's cycles take, however many are made of those wanted: over NCCL ranks take
/// a second and more to connect and to leave.
const SHARE: Duration = Duration::from_secs(15);
/// The least they make: a leak of the driver's least block in each is twice [`SLACK`].
const LEAST: u32 = 16;
/// How long the system may take to forget threads that have ended, and NCCL to end a
/// communicator's.
const SETTLES: Duration = AMPLE;
/// For how long a device's free memory stays as it is once nobody gives any back.
const QUIET: Duration = Duration::from_millis(200);
/// Device memory that the driver may keep: eight of its blocks of 2 MiB, for pools of small
/// allocations. A leak of one block a cycle is 32 MiB and more.
const SLACK: u64 = 16 << 20;

#[test]
fn communicators_with_ops_leave_nothing_behind() {
    let ranks = places(RANKS);
    // Of a test that also runs on the host none is skipped whole.
    let mut said = BTreeSet::new();
    let mut run = |found: Result<Machine, String>, cycles| match found {
        Ok(machine) => {
            let (cycles, took) = come_and_go(machine, ranks, cycles);
            println!("{machine:?}: {ranks} ranks, {cycles} cycles in {:.1} s", took.as_secs_f64());
        }
        Err(why) => {
            skipped::count_part("gpu_leaks", &why);
            if said.insert(why.clone()) {
                skipped::say("gpu_leaks", &why);
            }
        }
    };
    let nccl = |count| nccl::available().map(|_| count).map_err(|why| why.to_string());
    let even = |_| {
        if ranks.is_multiple_of(2) {
            Ok(Machine::TwoNodes { ranks })
        } else {
            Err(format!("{ranks} ranks are not two nodes"))
        }
    };
    run(Ok(Machine::Host), 100);
    run(common::gpus::count().map(places).map(Machine::Gpus), 1000);
    run(several().map(Machine::Staged), 100);
    run(several().and_then(nccl).map(Machine::Messages), 100);
    run(several().and_then(nccl).and_then(even), 100);
}

/// GPUs, or places on them, of which each rank has its own.
fn several() -> Result<u32, String> {
    let places = common::gpus::count().map(places);
    places.and_then(|count| {
        if count >= RANKS { Ok(count) } else { Err(format!("{RANKS} GPUs needed, {count} here")) }
    })
}

/// Makes so many cycles, after which there is no more than before, or as many as there is time for.
/// Returns how many, and how long they took.
fn come_and_go(machine: Machine, ranks: u32, wanted: u32) -> (u32, Duration) {
    let of_op = |&op| {
        Case::<bf16>::new(op, suite::unaligned(machine, op, ranks), ranks, Values::Integers, 61)
    };
    let cases: Vec<_> = machine.ops().iter().map(of_op).collect();
    let expected: Vec<_> = cases.iter().map(|case| case.expected_on(machine)).collect();
    let until = Instant::now() + SHARE;
    // By turns with either op. Returns the ranks' devices, and whether time is up for one of them,
    // which all hear.
    let cycle = |number: u32| {
        let at = number as usize % cases.len();
        let is_late = [u8::from(Instant::now() >= until)];
        let seen = machine.run(ranks, suite::defaults, |node| {
            let op = build_case(&cases[at], OpOptions::default(), node);
            let y = call(&op, &cases[at], node).unwrap();
            cases[at].assert_equal(&expected[at], &op, node.rank, &y, &format!("cycle {number}"));
            op.status().unwrap();
            (
                node.comm.device().ordinal(),
                node.comm.exchange(&is_late).unwrap().concat().contains(&1),
            )
        });
        let are_late = seen.iter().any(|&(_, is_late)| is_late);
        (seen.into_iter().filter_map(|(ordinal, _)| ordinal).collect::<Vec<u32>>(), are_late)
    };
    // They keep the contexts, which would go with the last communicator.
    let devices: Vec<CudaDevice> =
        cycle(0).0.into_iter().map(|ordinal| CudaDevice::open(ordinal).unwrap()).collect();
    (1..FIRST).for_each(|number| drop(cycle(number)));
    // Where ranks are processes, nobody reads what a device has free before all are through their
    // cycles, nor goes on before all have read.
    let meeting = Meeting::new(if launched().is_some() { ranks as usize } else { 1 });
    meeting.wait();
    let before = Held::at_rest(&devices);
    meeting.wait();
    let began = Instant::now();
    let mut cycles = 0;
    while cycles < wanted {
        let (_, are_late) = cycle(cycles);
        cycles += 1;
        if are_late && cycles >= LEAST {
            break;
        }
    }
    let took = began.elapsed();
    meeting.wait();
    let until = Instant::now() + SETTLES;
    loop {
        let after = Held::now(&devices);
        let beyond = after.beyond(&before, cycles);
        if beyond.is_empty() {
            break;
        }
        assert!(
            Instant::now() < until,
            "{machine:?}, {cycles} cycles: {}; there were {before:?}, there are {after:?}",
            beyond.join("; ")
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    meeting.wait();
    (cycles, took)
}

/// What this process holds.
#[derive(Debug)]
struct Held {
    /// Descriptors, threads and shared mappings, by kind: what they are called, without the numbers
    /// that each has anew.
    kinds: BTreeMap<String, usize>,
    mappings: usize,
    /// Free bytes of each device.
    free: Vec<u64>,
}

impl Held {
    /// When nothing that ranks have dropped is on its way back to a device any more: counted in, it
    /// would hide as much that leaks.
    fn at_rest(devices: &[CudaDevice]) -> Self {
        let until = Instant::now() + SETTLES;
        let (mut held, mut since) = (Self::now(devices), Instant::now());
        while since.elapsed() < QUIET && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            let now = Self::now(devices);
            if now.free != held.free {
                since = Instant::now();
            }
            held = now;
        }
        held
    }

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
        let descriptors = entries("/proc/self/fd").filter_map(|path| {
            Some(format!("descriptor of {}", std::fs::read_link(path).ok()?.display()))
        });
        let threads = entries("/proc/self/task").filter_map(|path| {
            Some(format!("thread {}", std::fs::read_to_string(path.join("comm")).ok()?.trim_end()))
        });
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
        let taken = self
            .free
            .iter()
            .zip(&before.free)
            .enumerate()
            .filter(|&(_, (after, before))| after + SLACK < *before);
        beyond.extend(taken.map(|(rank, (after, before))| {
            format!("rank {rank}'s device: {after} bytes free, {before} before")
        }));
        beyond
    }
}

fn entries(folder: &str) -> impl Iterator<Item = std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

/// A mapping of memory that others have too. Those of the driver's devices come and go with its own
/// memory.
fn shared(line: &str) -> Option<String> {
    let mut fields = line.split_ascii_whitespace();
    let shared = fields.nth(1)?.ends_with('s');
    let path = line.find('/').map(|at| &line[at..])?;
    (shared && !path.starts_with("/dev/nvidia")).then(|| format!("mapping of {path}"))
}
