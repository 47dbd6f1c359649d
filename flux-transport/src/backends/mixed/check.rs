//! What a mixed transport asks of an exchange beyond that it lies in the workspace.
//!
//! Invariant: in an exchange that passed, messages go along the rail and copies to ranks that this
//! one reaches. What is passed on is what the rounds bring, in their order.

use super::passing::of_round;
use crate::backends::jobs::{MessageRounds, Source};
use flux_core::program::{Forward, Round};
use flux_core::{Nodes, Rank};

/// Why `exchange` cannot be that of `rank`, if so.
pub(super) fn fault(
    exchange: &MessageRounds<'_>,
    rank: Rank,
    nodes: Nodes,
) -> Option<&'static str> {
    let on_rail = |peer: Rank| nodes.on_one_rail(rank, peer) && !nodes.together(rank, peer);
    if !exchange.rounds.iter().all(|round| on_rail(round.sent.peer) && on_rail(round.received.peer))
    {
        return Some("a message would leave its rail: the program is not one of these nodes");
    }
    let Source::Rows(push) = &exchange.source else { return None };
    let to_node_peer = |forward: &Forward| nodes.together(rank, Rank::new(forward.to.dest));
    if !push.forwards.iter().all(to_node_peer) {
        return Some("rows would be passed on to another node");
    }
    (!follow(push.forwards, exchange.rounds))
        .then_some("what is to be passed on is not what the rounds bring")
}

/// Whether the forwards are of what the rounds bring, in their order.
fn follow(forwards: &[Forward], rounds: &[Round]) -> bool {
    rounds.iter().fold(forwards, |rest, round| &rest[of_round(rest, round)..]).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::jobs::RowTransfers;
    use flux_core::program::{Chunk, Schedule, TileProgram};
    use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};

    fn programs(op: OpKind, nodes: Nodes, group: u32, chunk: u32) -> Vec<TileProgram> {
        let world = nodes.world();
        let problem = Problem::new(
            op,
            500 * world.index(),
            8 * world.index(),
            64 * world.index(),
            DType::Bf16,
            world,
        )
        .unwrap();
        let schedule = Schedule {
            chunk: Chunk::Tiles(chunk),
            group,
            ..Schedule::of(TileShape::new(64, 64, 64))
        };
        world
            .ranks()
            .map(|rank| TileProgram::build_across(&problem, rank, &schedule, nodes).unwrap())
            .collect()
    }

    fn fault_of(
        program: &TileProgram,
        forwards: &[Forward],
        rounds: &[Round],
        nodes: Nodes,
    ) -> Option<&'static str> {
        let push = RowTransfers {
            x: 0,
            row_stride: 0,
            row_bytes: 0,
            element_bytes: 2,
            rows: 0,
            place_bytes: 0,
            full_places: u32::MAX,
            transfers: &program.transfers,
            forwards,
        };
        let source = if program.problem.op() == OpKind::AllGatherGemm {
            Source::Rows(push)
        } else {
            Source::Stored { of_all: false }
        };
        fault(
            &MessageRounds { source, place_bytes: 0, rounds, peers: u32::MAX, op: 1 },
            program.rank,
            nodes,
        )
    }

    #[test]
    fn every_program_of_the_nodes_passes_and_no_other() {
        for (count, world, group, chunk) in
            [(2, 4, 1, 1), (2, 8, 3, 2), (3, 6, 6, 1), (4, 8, 2, 3), (3, 3, 1, 2)]
        {
            let nodes = Nodes::new(WorldSize::new(world).unwrap(), count).unwrap();
            for program in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter]
                .iter()
                .flat_map(|&op| programs(op, nodes, group, chunk))
            {
                let rounds = program.rounds().unwrap();
                assert_eq!(fault_of(&program, &program.forwards, &rounds, nodes), None, "{nodes}");
                let other = Nodes::apart(nodes.world());
                let apart = TileProgram { nodes: other, ..program.clone() };
                if nodes.are_mixed() && program.problem.op() == OpKind::AllGatherGemm {
                    let flat = programs(OpKind::AllGatherGemm, other, group, chunk)
                        [program.rank.index()]
                    .rounds()
                    .unwrap();
                    assert!(
                        fault_of(&apart, &[], &flat, nodes).unwrap().contains("leave its rail")
                    );
                    assert_eq!(
                        program.forwards.len(),
                        rounds.len() * (nodes.per_node() as usize - 1)
                    );
                    assert!(
                        fault_of(&program, &program.forwards, &rounds[1..], nodes)
                            .unwrap()
                            .contains("not what the rounds bring")
                    );
                    let mut rotated = program.forwards.clone();
                    rotated.rotate_left(1);
                    assert_eq!(
                        fault_of(&program, &rotated, &rounds, nodes).is_some(),
                        rounds.len() > 1,
                        "{nodes}"
                    );
                    rotated[0].to.dest = nodes.rail(program.rank).next().unwrap().get();
                    assert!(
                        fault_of(&program, &rotated, &rounds, nodes)
                            .unwrap()
                            .contains("another node")
                    );
                }
            }
        }
    }
}
