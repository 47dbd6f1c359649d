//! Building is collective: all ranks get the op, or all get an error.

use super::{Case, Check, Machine, build, build_case, call, defaults, unaligned};
use crate::common::{OPS, OpOptions, Values};
use flux_core::plan::{Chunk, Plan};
use flux_core::{Rank, TileShape};
use flux_ops::{BuildError, GemmReduceScatter};
use half::bf16;

/// What the ranks were told differs: all of them hear who asked for what, and can still build the
/// right op.
pub fn ranks_that_disagree_are_told_so(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let case = Case::<bf16>::new(
            OPS[0],
            unaligned(machine, OPS[0], world),
            world,
            Values::Integers,
            29,
        );
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let odd = node.rank.get() == 1;
            let texts = node.comm.exchange(
                build::<bf16>(
                    OPS[0],
                    [if odd { 64 } else { 32 } * world as usize, 8 * world as usize, 8],
                    OpOptions::default(),
                    &node.comm,
                )
                .map_err(|e| match e {
                    BuildError::Disagreement { .. } => e.to_string(),
                    other => panic!("{other}"),
                })
                .unwrap_err()
                .as_bytes(),
            );
            let texts = texts.unwrap();
            assert!(
                texts.iter().all(|text| *text == texts[0]),
                "the ranks were told different things"
            );
            let text = String::from_utf8(texts[0].clone()).unwrap();
            assert!(text.contains(&format!("rank 1 `ag_gemm max_m={}", 64 * world)), "{text}");

            let op = build_case(&case, OpOptions::default(), node);
            case.assert_equal(
                &expected,
                &op,
                node.rank,
                &call(&op, &case, node).unwrap(),
                "after a disagreement",
            );
        });
    }
}

/// Shapes and options that cannot be: the same typed error on every rank.
pub fn what_cannot_be_built_is_refused_on_every_rank(machine: Machine) {
    for world in machine.worlds(&[1, 3]) {
        let w = world as usize;
        machine.run(world, defaults, |node| {
            let refused = |op, shape, options| {
                build::<bf16>(op, shape, options, &node.comm).unwrap_err().to_string()
            };
            let shape_refused = |op, shape| refused(op, shape, OpOptions::default());
            assert!(shape_refused(OPS[0], [0, 8 * w, 8]).starts_with("max_m = 0"));
            assert!(shape_refused(OPS[1], [8 * w, 0, 8 * w]).starts_with("n = 0"));
            assert!(shape_refused(OPS[0], [8 * w, 8 * w, 0]).starts_with("k = 0"));
            assert!(
                shape_refused(OPS[0], [8 * w, 8 * w, 12])
                    .starts_with("k = 12 is not a multiple of 8")
            );
            assert!(
                shape_refused(OPS[1], [8 * w, 20, 8 * w])
                    .starts_with("n = 20 is not a multiple of 8")
            );
            assert!(
                shape_refused(OPS[1], [1 << 30, 8, 8 * w])
                    .starts_with("max_m = 1073741824 is above the limit")
            );
            if w > 1 {
                assert!(
                    shape_refused(OPS[0], [8 * w, 8 * w + 1, 8])
                        .contains("n = 25 is not a multiple of 8")
                );
                let few =
                    "k = 16 is too small for 3 ranks of at least 8 each: pad k with zeros to 24";
                assert_eq!(shape_refused(OPS[1], [8 * w, 8, 16]), few);
            }
            let bad = Plan { chunk: Chunk::Tiles(0), ..Plan::of(machine.tiles()[0]) };
            assert!(
                refused(OPS[0], [8 * w, 8 * w, 8], OpOptions::of(bad)).starts_with("chunk = 0")
            );
            let bad = Plan::of(TileShape::new(16, 16, 0));
            assert!(
                refused(OPS[0], [8 * w, 8 * w, 8], OpOptions::of(bad)).starts_with("tile.k = 0")
            );
            assert!(
                refused(
                    OPS[0],
                    [8 * w, 8 * w, 8],
                    OpOptions { workers: Some(0), ..OpOptions::default() }
                )
                .starts_with("workers = 0")
            );
            assert!(
                build::<bf16>(OPS[0], [8 * w, 8 * w, 8], OpOptions::default(), &node.comm).is_ok()
            );
        });
    }
}

/// One rank fails where the others do not: they are told which, and why.
pub fn a_rank_that_cannot_build_is_named_to_the_others(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        machine.run(world, defaults, |node| {
            let options =
                OpOptions { workers: (node.rank.get() == 1).then_some(0), ..OpOptions::default() };
            let shape = [8 * world as usize, 8 * world as usize, 8];
            match build::<bf16>(OPS[0], shape, options, &node.comm).unwrap_err() {
                BuildError::Workers { value: 0, .. } => assert_eq!(node.rank.get(), 1),
                BuildError::Peer { rank, reason } => {
                    assert!(
                        node.rank.get() != 1
                            && rank == Rank::new(1)
                            && reason.starts_with("workers = 0"),
                        "{reason}"
                    );
                }
                other => panic!("{other}"),
            }
            assert!(build::<bf16>(OPS[0], shape, OpOptions::default(), &node.comm).is_ok());
        });
    }
}

/// What a builder says before the build is what the op and the communicator then have.
pub fn the_workspace_is_known_before_it_is_taken(machine: Machine) {
    for world in machine.worlds(&[1, 4]) {
        machine.run(world, defaults, |node| {
            let w = world as usize;
            let plan = Plan { chunk: Chunk::Tiles(1), ..Plan::of(TileShape::new(128, 128, 64)) };
            let builder = GemmReduceScatter::<bf16>::builder(256 * w, 512, 64 * w).plan(plan);
            let before = builder.workspace(&node.comm).unwrap();
            let op = builder.build(&node.comm).unwrap();
            assert_eq!(op.workspace(), before);
            let held = node.comm.workspace_size();
            assert_eq!(held.max(before), held);
            // All peers' partial tiles: 2 by 4 tiles of 128x128 elements of 2 bytes from each.
            assert_eq!(before.half_bytes, (w as u64 - 1) * 256 * 512 * 2);
            // By the op's own plan, too.
            let own = GemmReduceScatter::<bf16>::builder(256 * w, 512, 64 * w)
                .workers(node.workers.unwrap_or(1));
            let before = own.workspace(&node.comm).unwrap();
            assert_eq!(own.build(&node.comm).unwrap().workspace(), before);
            let explained = op.explain();
            for part in ["gemm_rs m=", "tile=", "worker", "workspace: ", "bytes"] {
                assert!(explained.contains(part), "`{part}` is missing in: {explained}");
            }
        });
    }
}
