//! How much is [lent](Lent): whole waves of the multiprocessors that messages have, which end with
//! the workers' own.
//!
//! What whole waves of the workers leave then may be shared by these, where that takes less time.

use super::{Call, Lent};
use crate::OpKind;
use crate::program::schedule::Schedule;

/// Waves beside the best by bisection that are looked at as well: what is shared takes now more and
/// now less of a tile.
const BESIDE: u64 = 2;
/// Percent of the estimate of a call that a plan has to gain by what is shared beside messages.
/// Where it gained 4 to 7 by estimate four H100 took 2 to 6 % longer so, and where it gained more
/// up to 7 less (results/tuning/nccl-tp4.txt, 4.).
const SHARED_GAIN: u64 = 7;

impl Call<'_> {
    /// This, and what the call lends where that takes it the least time; what whole waves leave is
    /// shared then, or is not. As it is where nothing is lent.
    pub(super) fn lending(self, schedule: Schedule) -> (Self, Schedule) {
        if self.lends == 0 || self.shared.is_some() {
            return (self, schedule);
        }
        let whole = gaining(0, self.lending_beside(&Schedule { shares: 1, ..schedule }), (self, schedule));
        // Where shards come one by one it gains nothing; and what is shared comes first, as does
        // what a GEMM-ReduceScatter lends.
        if self.alone == 0 {
            return whole;
        }
        gaining(SHARED_GAIN, self.lending_beside(&Schedule { shares: self.workers, ..schedule }), whole)
    }

    /// With so many shares, and with what is lent as takes the least time. The more is lent, the
    /// less the workers take and the longer what is lent: the least is about where these meet.
    fn lending_beside(&self, schedule: &Schedule) -> (Self, Schedule) {
        let gathers = self.problem.op() == OpKind::AllGatherGemm;
        let lends = u64::from(self.lends);
        let first = if gathers { 0 } else { self.first_waves() };
        let of = |last: u64| {
            let lent = Lent { first: (first * lends) as u32, last: (last * lends) as u32 };
            let schedule = Schedule { lent, ..*schedule };
            (Self { lent, shared: Self::shared(self.problem, &schedule), ..*self }, schedule)
        };
        let own = if gathers { u64::from(self.problem.world().get()) * self.tiles } else { self.tiles };
        let most = own.saturating_sub(1) / lends;
        let (mut less, mut more) = (0, most + 1);
        while more - less > 1 {
            let last = less.midpoint(more);
            let (workers, lent) = of(last).0.ends();
            if lent <= workers { less = last } else { more = last }
        }
        let near = less.saturating_sub(BESIDE)..=(less + BESIDE).min(most);
        near.chain([0]).map(of).min_by_key(|(call, _)| call.estimate()).unwrap_or_else(|| of(0))
    }
}

/// The first where its estimate is less than the other's, by so many percent of it; else the other.
fn gaining<'a>(percent: u64, first: (Call<'a>, Schedule), other: (Call<'a>, Schedule)) -> (Call<'a>, Schedule) {
    let [time, others] = [&first, &other].map(|(call, _)| call.estimate());
    if time < others && 100 * time <= (100 - percent) * others { first } else { other }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Channels, Sending, TileProgram};
    use crate::{DType, Nodes, Problem, Rank, WorldSize};

    fn problem(op: OpKind, world: u32, m: usize) -> Problem {
        let (n, k) = if op == OpKind::AllGatherGemm { (28672, 8192) } else { (8192, 28672) };
        Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap()
    }

    fn channels(world: u32) -> Channels {
        Channels { all: 4 * world, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false }
    }

    #[test]
    fn what_is_lent_is_waves_that_end_no_later_than_the_workers() {
        for (world, op, m) in [2, 4, 8].into_iter().flat_map(|world| {
            [OpKind::AllGatherGemm, OpKind::GemmReduceScatter].into_iter().flat_map(move |op| [2048, 4096, 8192].map(|m| (world, op, m)))
        }) {
            let (problem, channels) = (problem(op, world, m), channels(world));
            for sending in (1..world).map(|peers| Sending::Beside { peers }) {
                let schedule = Schedule::in_messages(&problem, &channels, sending, Nodes::apart(problem.world()));
                let lent = schedule.lent;
                let of = |schedule: &Schedule| Call::of_whole_tiles(&problem, &channels, (sending, world - 1), schedule, 100);
                let call = Call { shared: Call::shared(&problem, &schedule), ..of(&schedule) };
                let is_whole = |items: u32| items.is_multiple_of(call.lends);
                assert!(is_whole(lent.first) && is_whole(lent.last), "{problem}, {sending}: {lent:?}");
                let program = TileProgram::build(&problem, Rank::new(1), &schedule).unwrap();
                assert_eq!(lent.within(&program), lent, "{problem}, {sending}");
                let without = of(&Schedule { lent: Lent::NONE, shares: 1, ..schedule }).estimate();
                assert!(call.estimate() <= without, "{problem}, {sending}, {lent:?}: {} and {without} ns", call.estimate());
            }
        }
    }

    /// Waves of an AllGather-GEMM's tiles behind messages, and of a GEMM-ReduceScatter's ahead of
    /// them.
    #[test]
    fn many_rows_lend_to_four_ranks() {
        let of =
            |op, m| Schedule::in_messages(&problem(op, 4, m), &channels(4), Sending::ALL, Nodes::apart(WorldSize::new(4).unwrap())).lent;
        assert_eq!(of(OpKind::AllGatherGemm, 4096), Lent { first: 0, last: 3 * 12 });
        assert_eq!(of(OpKind::GemmReduceScatter, 8192), Lent { first: 3 * 12, last: 0 });
    }

    #[test]
    fn nothing_is_lent_over_a_network_to_mates_and_where_messages_go_before() {
        let world = WorldSize::new(4).unwrap();
        let (problem, lends) = (problem(OpKind::AllGatherGemm, 4, 4096), channels(4));
        let of = |channels: &Channels, sending, nodes| Schedule::in_messages(&problem, channels, sending, nodes).lent;
        let (apart, two) = (Nodes::apart(world), Nodes::new(world, 2).unwrap());
        assert!(of(&lends, Sending::ALL, apart).last > 0);
        for (channels, sending, nodes) in [
            (Channels { network: true, ..lends }, Sending::ALL, apart),
            (Channels::FREE, Sending::ALL, apart),
            (lends, Sending::Before, apart),
            (lends, Sending::ALL, two),
        ] {
            assert_eq!(of(&channels, sending, nodes), Lent::NONE, "{channels:?}, {sending}");
        }
    }
}
