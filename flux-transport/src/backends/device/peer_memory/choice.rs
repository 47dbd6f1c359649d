//! Which device each rank uses.
//!
//! Invariant: ordinals are valid in one process only (`CUDA_VISIBLE_DEVICES`); whether two ranks
//! share a device is decided by UUID. The variable is only shown to users.

use super::error::PeerMemoryError;
use super::offer::Introduction;
use crate::backends::options::Options;
use crate::bootstrap::control::Launch;
use crate::bootstrap::world::World;
use flux_cuda::{CudaError, DeviceInfo};

/// The device that this rank is to use.
pub(crate) fn own_device(world: &World, options: &Options) -> Result<DeviceInfo, CudaError> {
    let visible = flux_cuda::device_count()?;
    let ordinal = ordinal(options.device, world.launch(), world.local_rank(), visible);
    flux_cuda::device_info(ordinal)
}

/// The ordinal a rank uses, of `visible`: the one asked for, else the one with the rank's number on
/// this machine. A process that sees one device uses it.
fn ordinal(asked: Option<u32>, launch: Launch, local_rank: u32, visible: u32) -> u32 {
    let alone = launch == Launch::Processes && visible == 1;
    asked.unwrap_or(if alone { 0 } else { local_rank })
}

/// Whether every rank has a device of its own, or shares it as both agreed.
pub(super) fn distinct(rank: u32, ranks: &[Introduction]) -> Result<(), PeerMemoryError> {
    let own = &ranks[rank as usize];
    let uuid = own.identity.uuid;
    let same = |&(peer, other): &(u32, &Introduction)| {
        let shared = own.identity.shared_device && other.identity.shared_device;
        peer != rank && other.identity.uuid == uuid && !shared
    };
    match (0..).zip(ranks).find(same) {
        Some((peer, other)) => Err(PeerMemoryError::SameDevice {
            rank,
            peer,
            uuid,
            visible: [own.visible.clone(), other.visible.clone()],
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::offer::DeviceIdentity;
    use super::*;
    use crate::topology::hints;
    use flux_cuda::DeviceUuid;
    use proptest::prelude::*;

    /// Device `number` of a machine.
    fn uuid(number: u8) -> DeviceUuid {
        DeviceUuid([number + 0xa0; 16])
    }

    /// What a driver shows of a machine of eight devices: those of the list until one that it does
    /// not know, by number or by UUID, or all.
    fn visible(list: Option<&str>) -> Vec<DeviceUuid> {
        let Some(list) = list else { return (0..8).map(uuid).collect() };
        let device = |entry: &str| match entry.parse() {
            Ok(number) => Some(uuid(number)).filter(|_| number < 8),
            // A UUID may be cut where it is unique.
            Err(_) => {
                (0..8).map(uuid).find(|uuid| entry.len() > 4 && uuid.to_string().starts_with(entry))
            }
        };
        list.split(',').map_while(device).collect()
    }

    /// The ranks of processes that see the devices of these lists, on the devices that they take;
    /// `None` for one that has none.
    fn ranks(lists: &[Option<&str>]) -> Option<Vec<Introduction>> {
        let rank = |(local_rank, list): (u32, Option<&str>)| {
            let visible = visible(list);
            let ordinal = ordinal(None, Launch::Processes, local_rank, visible.len() as u32);
            let uuid = *visible.get(ordinal as usize)?;
            let identity = DeviceIdentity {
                process: [local_rank as u8; 16],
                uuid,
                ordinal,
                posix_handles: true,
                shared_device: false,
                instance: false,
            };
            Some(Introduction { identity, visible: list.unwrap_or_default().to_owned() })
        };
        (0..).zip(lists.iter().copied()).map(rank).collect()
    }

    fn devices(lists: &[Option<&str>]) -> Vec<DeviceUuid> {
        let ranks = ranks(lists).unwrap();
        (0..lists.len() as u32).for_each(|rank| distinct(rank, &ranks).unwrap());
        ranks.iter().map(|rank| rank.identity.uuid).collect()
    }

    #[test]
    fn ranks_find_their_devices_whatever_is_visible() {
        assert_eq!(devices(&[None; 8]), (0..8).map(uuid).collect::<Vec<_>>());
        assert_eq!(devices(&[Some("3,1,0,2"); 4]), [3, 1, 0, 2].map(uuid));
        // One device a process, by number or by UUID: each is number 0 there.
        assert_eq!(devices(&[Some("5"), Some("2"), Some("0")]), [5, 2, 0].map(uuid));
        let (a, b) = (uuid(6).to_string(), uuid(1).to_string());
        assert_eq!(devices(&[Some(&a), Some(&b[..8])]), [6, 1].map(uuid));
        let both = format!("{a},{b}");
        assert_eq!(devices(&[Some(both.as_str()); 2]), [6, 1].map(uuid));
        // Lists of different orders that lead to different devices.
        assert_eq!(devices(&[Some("0,1"), Some("0,1"), None]), [0, 1, 2].map(uuid));
    }

    #[test]
    fn two_ranks_on_one_device_are_both_named_whatever_its_numbers() {
        // Each is shown the same one alone; the lists cross; one sees all.
        for lists in [[Some("4"), Some("4")], [Some("2,3"), Some("3,2")], [None, Some("1,0")]] {
            let ranks = ranks(&lists).unwrap();
            for rank in 0..2 {
                let error = distinct(rank, &ranks).unwrap_err();
                let PeerMemoryError::SameDevice { rank: one, peer, uuid, .. } = &error else {
                    panic!("{lists:?}: {error}")
                };
                assert_eq!((*one, *peer, *uuid), (rank, 1 - rank, ranks[0].identity.uuid));
                // What each was shown is where the mistake is.
                let shown = [one, peer].map(|&rank| lists[rank as usize].unwrap_or_default());
                assert!(error.to_string().ends_with(&hints::own_device(shown)), "{error}");
            }
        }
        // The same number is not the same device.
        assert!(distinct(0, &ranks(&[Some("4"), Some("5")]).unwrap()).is_ok());
    }

    #[test]
    fn a_rank_without_a_device_is_no_rank_on_another() {
        assert!(ranks(&[Some("0,1"), Some("0,1"), Some("0,1")]).is_none());
        assert!(ranks(&[Some("")]).is_none());
        assert_eq!(
            ordinal(Some(5), Launch::Processes, 0, 1),
            5,
            "what is asked for is never replaced"
        );
        assert_eq!(ordinal(None, Launch::Threads, 1, 1), 1, "threads see the same devices");
    }

    proptest! {
        #[test]
        fn any_order_of_all_devices_gives_each_rank_its_own(
            order in Just((0..8_u8).collect::<Vec<_>>()).prop_shuffle(),
            names: [bool; 8],
        ) {
            let entry = |(&number, name): (&u8, bool)| if name { uuid(number).to_string() } else { number.to_string() };
            let list = order.iter().zip(names).map(entry).collect::<Vec<_>>().join(",");
            prop_assert_eq!(devices(&[Some(list.as_str()); 8]), order.into_iter().map(uuid).collect::<Vec<_>>());
        }

        #[test]
        fn distinct_fails_exactly_for_ranks_that_share_and_did_not_agree_to(
            ranks in prop::collection::vec((0..4_u8, any::<bool>()), 1..6), one_process: bool
        ) {
            let identity = |(rank, &(number, shared_device)): (u8, &(u8, bool))| {
                let process = [if one_process { 0 } else { rank }; 16];
                let identity = DeviceIdentity { process, uuid: uuid(number), ordinal: 0, posix_handles: true, shared_device, instance: false };
                Introduction { identity, visible: String::new() }
            };
            let introductions: Vec<_> = (0..).zip(&ranks).map(identity).collect();
            for (rank, &(number, agrees)) in ranks.iter().enumerate() {
                let mut others = ranks.iter().enumerate().filter(|&(peer, &(other, _))| peer != rank && other == number);
                let may = others.all(|(_, &(_, shared))| shared && agrees);
                prop_assert_eq!(distinct(rank as u32, &introductions).is_ok(), may);
            }
        }
    }
}
