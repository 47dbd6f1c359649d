//! The rules of packets, broken on purpose.

use crate::mutations::{assert_violates, pick};
use crate::strategies::{Call, Knobs, knob_calls};
use flux_core::OpKind::{AllGatherGemm, GemmReduceScatter};
use flux_core::program::check::{Violation, verify};
use flux_core::program::{Chunk, Schedule, ScheduleError, TileProgram};
use flux_core::{DType, Nodes, Problem, Rank, TileShape, WorldSize};
use proptest::prelude::*;
use proptest::sample::Index;

fn packed(stack: bool) -> impl Strategy<Value = Knobs> {
    (1..=3_u32, 1..=2_u32).prop_map(move |(k_chunks, splits)| Knobs { k_chunks, splits, stack, packets: true })
}

fn gathering() -> impl Strategy<Value = Call> {
    knob_calls(AllGatherGemm, 2..=6, 1..=3, packed(true))
}

proptest! {
    #[test]
    fn what_is_sent_is_what_is_taken(call in gathering(), rank: Index, arrival: Index, kind in 0..5) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world().get();
        let at = arrival.index(p.arrivals.len());
        match kind {
            0 => p.arrivals[at].source = (p.arrivals[at].source + 1) % world,
            1 => p.arrivals[at].place += 1,
            2 => p.arrivals[at].raise += 1,
            3 => p.transfers.swap(0, 1),
            _ => drop(p.transfers.drain(1..)),
        }
        if kind == 3 {
            // the order of the readers does not matter
            prop_assert_eq!(verify(&call.0), Ok(()));
        } else {
            assert_violates!(call, Violation::Packets { .. });
        }
    }

    #[test]
    fn only_scattered_rows_are_packed(call in gathering()) {
        let mut call = call;
        for p in &mut call.0 {
            p.packed_rows = true;
        }
        assert_violates!(call, Violation::Packets { .. });
    }

    #[test]
    fn agreement(call in prop_oneof![gathering(), knob_calls(GemmReduceScatter, 2..=6, 1..=3, packed(true))], rank: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        p.packed_rows = !p.packed_rows;
        assert_violates!(call, Violation::Disagreement { what: "packets", .. });
        let p = pick(&mut call, rank);
        p.packed_rows = !p.packed_rows;
        p.arrivals.pop();
        if !call.0[0].packed_rows {
            assert_violates!(call, Violation::Disagreement { what: "arrivals", .. });
        }
    }
}

/// A band's first slices come in packets, those of later bands do not.
#[test]
fn a_narrow_first_slice_of_the_first_band_is_packed() {
    let world = WorldSize::new(4).unwrap();
    let problem = Problem::new(AllGatherGemm, 1024, 49152, 12288, DType::Bf16, world).unwrap();
    let schedule = Schedule { band: 2, k_chunks: 3, packets: true, ..Schedule::of(TileShape::new(128, 192, 64)) };
    let program = TileProgram::build(&problem, Rank::new(1), &schedule).unwrap();
    let [arrival] = program.arrivals[..] else { panic!("{:?}", program.arrivals) };
    assert_eq!((arrival.source, arrival.place, arrival.raise), (2, 1, 4), "one narrow slice and three of the rest");
    let lead = program.transfers[0];
    assert_eq!((lead.dest, lead.rows, lead.col, lead.cols), (0, 256, 0, 1024));
    assert_eq!(program.packet_bytes(), 256 * 1024 * 2);
    let without = Schedule { packets: false, ..schedule };
    let signals = |schedule| TileProgram::build(&problem, Rank::new(1), schedule).unwrap().workspace().signals;
    assert_eq!((signals(&without), signals(&schedule)), (3 * 3, 3 * 4 + 4 * 256 * 1024 * 2 / 64));
}

#[test]
fn what_cannot_be_packed_is_refused_with_a_reason() {
    let world = WorldSize::new(4).unwrap();
    let problem = |op| Problem::new(op, 4096, 4096, 4096, DType::Bf16, world).unwrap();
    let tile = TileShape::new(128, 128, 64);
    let packed = Schedule { packets: true, ..Schedule::of(tile) };
    let refused = |op, schedule: Schedule, nodes| {
        let error = TileProgram::build_across(&problem(op), Rank::new(0), &schedule, Nodes::new(world, nodes).unwrap()).unwrap_err();
        assert!(matches!(error, ScheduleError::Packets { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(AllGatherGemm, packed, 4).contains("`band`"));
    assert!(refused(GemmReduceScatter, packed, 4).contains("`stack`"));
    assert!(refused(AllGatherGemm, Schedule { band: 2, chunk: Chunk::Tiles(1), ..packed }, 4).contains("whole"));
    assert!(refused(AllGatherGemm, Schedule { band: 2, ..packed }, 2).contains("nodes"));
    let many = Problem::new(GemmReduceScatter, 1 << 20, 4096, 4096, DType::Bf16, world).unwrap();
    let error = TileProgram::build(&many, Rank::new(0), &Schedule { stack: true, ..packed }).unwrap_err();
    assert!(error.to_string().contains("few rows"), "{error}");
    let alone = Problem::new(AllGatherGemm, 64, 64, 64, DType::Bf16, WorldSize::new(1).unwrap()).unwrap();
    assert!(TileProgram::build(&alone, Rank::new(0), &packed).unwrap().arrivals.is_empty());
}
