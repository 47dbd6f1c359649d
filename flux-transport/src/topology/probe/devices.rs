//! Asks the devices: which pairs there are, and what was found between them.
//!
//! Invariant: every ordered pair has an answer. Only pairs that the driver allows get contexts.

use super::exchange::{Lost, PATIENCE, ROUNDS, Side, ping_pong, store};
use super::report::{ChildReport, Direction, Report, pairs};
use super::request::Request;
use crate::topology;
use flux_cuda::{CudaError, DeviceInfo, DeviceUuid};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Pairs that may fail before the others are passed over: each takes as long as the patience.
const ENOUGH: usize = 3;

/// Asks, and says how the machine connects the devices.
pub(super) fn ask(request: &Request) -> ChildReport {
    let found = infos(request).and_then(|infos| {
        Ok((directions(&infos, request.veto).map_err(|error| error.to_string())?, infos))
    });
    match found {
        Ok((found, infos)) => {
            let (directions, mut notes) = found;
            let topology = topology::look(&infos);
            notes.extend(topology.notes());
            let advice = if directions.iter().all(|d| d.fault.is_none()) {
                Vec::new()
            } else {
                topology.advice()
            };
            ChildReport::Report(Report {
                devices: request.devices.clone(),
                directions,
                notes,
                advice,
            })
        }
        Err(why) => ChildReport::Cannot(why),
    }
}

/// The devices as this process numbers them.
fn infos(request: &Request) -> Result<Vec<DeviceInfo>, String> {
    let all = || {
        (0..flux_cuda::device_count()?).map(flux_cuda::device_info).collect::<Result<Vec<_>, _>>()
    };
    let all = all().map_err(|error| error.to_string())?;
    let one = |uuid: &DeviceUuid| {
        let found = all.iter().find(|info| info.uuid == *uuid).cloned();
        found.ok_or_else(|| {
            format!("the process that asks sees {} devices, and not {uuid}", all.len())
        })
    };
    request.devices.iter().map(one).collect()
}

fn directions(
    infos: &[DeviceInfo],
    veto: bool,
) -> Result<(Vec<Direction>, Vec<String>), CudaError> {
    let mut directions = Vec::new();
    for (from, to) in pairs(infos.len()) {
        let granted = flux_cuda::can_access_peer(infos[from].ordinal, infos[to].ordinal)?;
        let fault = (!granted).then(|| "the driver grants no peer access".to_owned());
        directions.push(Direction { from, to, fault });
    }
    let mut notes = Vec::new();
    let mut sides = BTreeMap::new();
    let mut failed = 0;
    for (a, b) in pairs(infos.len()).filter(|(a, b)| a < b) {
        if directions
            .iter()
            .any(|d| d.fault.is_some() && [(a, b), (b, a)].contains(&(d.from, d.to)))
        {
            continue;
        }
        // Only what the driver grants costs contexts.
        for at in [a, b] {
            if let Entry::Vacant(place) = sides.entry(at) {
                place.insert(Side::new(&infos[at])?);
            }
        }
        let both = |why: String| (Some(why.clone()), Some(why));
        let (there, back) = if failed < ENOUGH {
            // What the driver granted, it refuses: that is a fault of the pair, not of the asking.
            pair(&sides[&a], &sides[&b], a, b, veto, &mut notes)
                .unwrap_or_else(|error| both(error.to_string()))
        } else {
            both(format!("not asked, as {ENOUGH} pairs had failed"))
        };
        failed += usize::from(there.is_some() || back.is_some());
        for direction in &mut directions {
            match (direction.from, direction.to) {
                way if way == (a, b) => direction.fault.clone_from(&there),
                way if way == (b, a) => direction.fault.clone_from(&back),
                _ => {}
            }
        }
    }
    Ok((directions, notes))
}

/// The faults from the first to the second, and back.
fn pair(
    one: &Side,
    other: &Side,
    a: usize,
    b: usize,
    veto: bool,
    notes: &mut Vec<String>,
) -> Result<(Option<String>, Option<String>), CudaError> {
    let ordinals = [one.device.ordinal(), other.device.ordinal()];
    let (at_one, at_other) = (one.memory.map(&ordinals)?, other.memory.map(&ordinals)?);
    let there = store(one, other, &at_other, nonce(a, b), veto)?;
    let back = store(other, one, &at_one, nonce(b, a), veto)?;
    if there.is_some() || back.is_some() {
        return Ok((there, back));
    }
    match ping_pong(one, &at_one, other, &at_other)? {
        Ok(took) => {
            let us = took.as_secs_f64() * 1e6 / f64::from(ROUNDS);
            let [one, other] = [one, other].map(|side| side.device.info().pci.to_lowercase());
            notes.push(format!(
                "GPUs {one} and {other}: a word there and back in {us:.1} us, by streams"
            ));
            Ok((None, None))
        }
        Err(Lost { first, round }) => {
            let why = format!(
                "while both wrote at once, write {round} of {ROUNDS} was not seen in {PATIENCE:?}"
            );
            Ok(if first { (Some(why), None) } else { (None, Some(why)) })
        }
    }
}

/// The pattern of a direction: no two have the same, and none is what memory is cleared to.
fn nonce(from: usize, to: usize) -> u32 {
    (from as u32 + 1) << 16 | (to as u32 + 1) | 0x8000_8000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_directions_have_one_pattern() {
        let all: std::collections::BTreeSet<u32> =
            pairs(16).map(|(from, to)| nonce(from, to)).collect();
        assert_eq!((all.len(), all.contains(&0)), (16 * 15, false));
    }
}
