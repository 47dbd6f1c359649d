//! Rule: a rank computes each element of its outputs exactly once.

use super::rect::{Rect, overlap};
use super::{Output, Violation};
use crate::program::{Sink, TileProgram, WorkItem};
use crate::{Rank, SumsTo};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let mut items: Vec<Vec<usize>> = vec![Vec::new(); outputs(p).len()];
    for (index, item) in
        p.items.iter().enumerate().filter(|(_, item)| item.sink != Sink::Partial && item.rows > 0)
    {
        items[output_of(p, item)].push(index);
    }
    for (output, items) in outputs(p).into_iter().zip(items) {
        let rects: Vec<Rect> = items.iter().map(|&index| Rect::of_item(&p.items[index])).collect();
        if let Some((first, second)) = overlap(&rects) {
            return Err(Violation::CoveredTwice {
                rank: p.rank,
                output,
                first: items[first],
                second: items[second],
            });
        }
        // Disjoint items inside the output cover it if the areas are equal.
        let rows = match output {
            Output::AllShards => p.problem.m(),
            Output::Shard(shard) => p.problem.shard_rows(Rank::new(shard)).len() as u32,
            Output::Reduced => p.reduced_rows(p.rank).len() as u32,
            Output::Copied => p.problem.m() - p.problem.shard_rows(p.rank).len() as u32,
        };
        let all = u64::from(rows) * u64::from(p.problem.n_local(p.rank));
        let covered: u64 = rects.iter().map(|rect| rect.area()).sum();
        if covered < all {
            return Err(Violation::NotCovered { rank: p.rank, output, missing: all - covered });
        }
    }
    Ok(())
}

/// The matrices that a rank computes.
fn outputs(p: &TileProgram) -> Vec<Output> {
    match (p.rows.is_flattened(), p.problem.op().sums_to()) {
        (false, sums_to) => {
            let copied = (sums_to == SumsTo::All).then_some(Output::Copied);
            (0..p.problem.world().get()).map(Output::Shard).chain(copied).collect()
        }
        (true, SumsTo::Nothing) => vec![Output::AllShards],
        (true, SumsTo::Rows | SumsTo::All) => [Output::AllShards, Output::Reduced]
            .into_iter()
            .chain(p.rows.has_two_exchanges().then_some(Output::Copied))
            .collect(),
    }
}

/// Index of an item's output.
fn output_of(p: &TileProgram, item: &WorkItem) -> usize {
    let output = match (p.rows.is_flattened(), p.problem.op().sums_to()) {
        (true, _) if item.sink == Sink::Copy => 2,
        (true, _) => u32::from(item.sink == Sink::ReduceRows),
        (false, _) if item.sink == Sink::Copy => p.problem.world().get(),
        (false, SumsTo::Nothing) => item.out_outer,
        (false, SumsTo::Rows | SumsTo::All) => item.a_outer,
    };
    output as usize
}
