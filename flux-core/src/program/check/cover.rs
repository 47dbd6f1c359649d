//! Rule: each rank computes each element of each shard of its output exactly once.

use super::Violation;
use crate::OpKind;
use crate::program::{TileProgram, WorkItem};
use std::collections::BTreeMap;

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let shard_of = |item: &WorkItem| match p.problem.op() {
        OpKind::AllGatherGemm => item.out_outer,
        OpKind::GemmReduceScatter => item.dest,
    };
    let mut shards: Vec<Vec<usize>> = vec![Vec::new(); p.problem.world().index()];
    for (index, item) in p.items.iter().enumerate() {
        shards[shard_of(item) as usize].push(index);
    }
    for (shard, items) in (0..).zip(shards) {
        let elements = |&index: &usize| u64::from(p.items[index].rows) * u64::from(p.items[index].cols);
        let covered: u64 = items.iter().map(elements).sum();
        if let Some((first, second)) = overlap(p, items) {
            return Err(Violation::CoveredTwice { rank: p.rank, shard, first, second });
        }
        // what does not overlap and lies inside the shard covers it if the areas are equal
        let all = u64::from(p.problem.m_shard()) * u64::from(p.problem.n_local());
        if covered < all {
            return Err(Violation::NotCovered { rank: p.rank, shard, missing: all - covered });
        }
    }
    Ok(())
}

/// Two of these items that have elements in common: a sweep down the rows, which holds the columns of the items it is in.
fn overlap(p: &TileProgram, mut items: Vec<usize>) -> Option<(usize, usize)> {
    items.sort_by_key(|&index| p.items[index].row);
    let mut ends: Vec<usize> = items.clone();
    ends.sort_by_key(|&index| p.items[index].row + p.items[index].rows);
    let mut ends = ends.into_iter().peekable();
    let mut by_col: BTreeMap<u32, usize> = BTreeMap::new();
    for index in items {
        let item = &p.items[index];
        while let Some(ended) = ends.next_if(|&ended| p.items[ended].row + p.items[ended].rows <= item.row) {
            by_col.remove(&p.items[ended].col);
        }
        // the nearest item to the left of this one's last column
        if let Some((_, &other)) = by_col.range(..item.col + item.cols).next_back()
            && p.items[other].col + p.items[other].cols > item.col
        {
            return Some((other.min(index), other.max(index)));
        }
        by_col.insert(item.col, index);
    }
    None
}
