//! The plans of an op, as ranks exchange them.
//!
//! Invariant: buckets ascend, and each `m` of the op has one.

use flux_core::plan::{PLAN_BYTES, Plan, PlanOrigin, TableKind};

/// Bytes of a [`Choice`] as ranks exchange it: the plan, the SM count, and the origin with its `m`.
const CHOICE_BYTES: usize = PLAN_BYTES + 9;

/// A plan with what its schedule is derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) plan: Plan,
    /// SMs that stream-K counts with, on all ranks.
    pub(crate) sms: u32,
    pub(crate) origin: PlanOrigin,
}

impl Choice {
    fn to_bytes(self) -> [u8; CHOICE_BYTES] {
        let (origin, m) = match self.origin {
            PlanOrigin::Caller => (1, 0),
            PlanOrigin::Model => (2, 0),
            PlanOrigin::Table(TableKind::User) => (3, 0),
            PlanOrigin::Table(TableKind::Shipped) => (4, 0),
            PlanOrigin::Neighbour { table: TableKind::User, m } => (5, m),
            PlanOrigin::Neighbour { table: TableKind::Shipped, m } => (6, m),
        };
        let mut bytes = [0; CHOICE_BYTES];
        let (plan, rest) = bytes.split_at_mut(PLAN_BYTES);
        plan.copy_from_slice(&self.plan.to_bytes());
        rest[..4].copy_from_slice(&self.sms.to_le_bytes());
        rest[4..8].copy_from_slice(&m.to_le_bytes());
        rest[8] = origin;
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (plan, rest) = bytes.split_first_chunk::<PLAN_BYTES>()?;
        let &[a, b, c, d, m @ .., origin] = <&[u8; 9]>::try_from(rest).ok()?;
        let (sms, m) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(m));
        let origin = match origin {
            1 => PlanOrigin::Caller,
            2 => PlanOrigin::Model,
            3 => PlanOrigin::Table(TableKind::User),
            4 => PlanOrigin::Table(TableKind::Shipped),
            5 => PlanOrigin::Neighbour { table: TableKind::User, m },
            6 => PlanOrigin::Neighbour { table: TableKind::Shipped, m },
            _ => return None,
        };
        Some(Self { plan: Plan::from_bytes(plan).ok()?, sms, origin })
    }
}

/// A plan that holds for `m` up to `last`, from the bucket before on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) last: u32,
    pub(crate) choice: Choice,
}

/// Bytes of a [`Bucket`].
const BUCKET_BYTES: usize = CHOICE_BYTES + 4;

/// An op's plans for all `m`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buckets(Vec<Bucket>);

impl Buckets {
    /// Takes buckets in ascending order; at least one.
    pub(crate) const fn new(buckets: Vec<Bucket>) -> Self {
        Self(buckets)
    }

    /// One choice for all `m`.
    pub(crate) fn one(last: u32, choice: Choice) -> Self {
        Self(vec![Bucket { last, choice }])
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|bucket| {
                bucket.last.to_le_bytes().into_iter().chain(bucket.choice.to_bytes())
            })
            .collect()
    }

    /// Reads what another rank has chosen; nothing where it is none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (chunks, rest) = bytes.as_chunks::<BUCKET_BYTES>();
        let one = |bytes: &[u8; BUCKET_BYTES]| {
            let (last, choice) = bytes.split_first_chunk()?;
            Some(Bucket { last: u32::from_le_bytes(*last), choice: Choice::from_bytes(choice)? })
        };
        let buckets = chunks.iter().map(one).collect::<Option<Vec<_>>>()?;
        let ascends = buckets.first().is_some_and(|first| first.last > 0)
            && buckets.is_sorted_by(|a, b| a.last < b.last);
        (rest.is_empty() && ascends).then_some(Self(buckets))
    }

    /// The number of the bucket of `m`; the last one's beyond.
    pub(crate) fn number(&self, m: u32) -> usize {
        self.0.partition_point(|bucket| bucket.last < m).min(self.0.len().saturating_sub(1))
    }

    pub(crate) fn get(&self, m: u32) -> &Choice {
        &self.0[self.number(m)].choice
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Bucket> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_exchanged_whole_and_other_bytes_are_none() {
        let plan: Plan = "tile=128x256x64 rows=per-shard:2 k=stream-k chunk=1".parse().unwrap();
        let of_table = |table| [PlanOrigin::Table(table), PlanOrigin::Neighbour { table, m: 77 }];
        let origins = [TableKind::User, TableKind::Shipped].map(of_table);
        for &origin in origins.as_flattened().iter().chain(&[PlanOrigin::Caller, PlanOrigin::Model])
        {
            let choice = Choice { plan, sms: 114, origin };
            assert_eq!(Choice::from_bytes(&choice.to_bytes()), Some(choice));
        }
        for bytes in [&[][..], &[0; CHOICE_BYTES], &[1; CHOICE_BYTES - 1]] {
            assert_eq!(Choice::from_bytes(bytes), None);
        }
    }

    #[test]
    fn buckets_are_exchanged_whole_and_other_bytes_are_none() {
        let choice = |text: &str| Choice {
            plan: text.parse().unwrap(),
            sms: 132,
            origin: PlanOrigin::Model,
        };
        let of = |last, text| Bucket { last, choice: choice(text) };
        let buckets = Buckets::new(vec![
            of(8, "tile=64x128x64 rows=flattened"),
            of(24, "tile=128x128x64"),
            of(100, "tile=128x256x64"),
        ]);
        assert_eq!(Buckets::from_bytes(&buckets.to_bytes()), Some(buckets.clone()));
        let bytes = buckets.to_bytes();
        let swapped = [&bytes[BUCKET_BYTES..2 * BUCKET_BYTES], &bytes[..BUCKET_BYTES]].concat();
        for bytes in [&[][..], &bytes[1..], &bytes[..=BUCKET_BYTES], &swapped, &[0; BUCKET_BYTES]] {
            assert_eq!(Buckets::from_bytes(bytes), None);
        }
        let ends = |range: std::ops::RangeInclusive<u32>| {
            range.map(|m| buckets.number(m)).collect::<Vec<_>>()
        };
        assert_eq!(
            (ends(1..=8), ends(9..=24), ends(25..=100)),
            (vec![0; 8], vec![1; 16], vec![2; 76])
        );
    }
}
