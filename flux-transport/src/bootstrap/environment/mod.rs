//! Who this process is and where it meets the others, from its launcher's variables.
//!
//! Invariant: a family of variables is complete or refused, and two families must agree.
//! `MASTER_PORT` is never bound: torchrun's store sits there.

mod address;
mod ancestor;
mod directories;
mod launchers;
mod nodelist;
mod place;
mod variables;

use std::ffi::OsString;
use std::path::PathBuf;

use flux_core::{Rank, WorldSize};

pub(super) use address::Address;
pub(super) use place::NetworkPlace;
pub use place::{HostPlace, Place};

pub(crate) use self::address::own_address;
pub(crate) use self::directories::{runtime_directory, variable_of};
use self::launchers::{LAUNCHERS, LauncherFamily, Placement, SLURM_FAMILY};
use self::place::digest;
use self::variables::Variables;
use super::error::BootstrapError;
use super::names::{
    FLUX_HOST_ID, FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_WORLD_SIZE,
};
use super::secret::Secret;

const OWN: [&str; 4] = [FLUX_RANK, FLUX_WORLD_SIZE, FLUX_LOCAL_RANK, FLUX_RENDEZVOUS];
const OWN_NAME: &str = "flux";
/// The launcher of a process that is no rank of a launch, whatever variables a job has set.
const NO_LAUNCHER: &str = "none";

/// One process's place in a launch.
///
/// | launcher | variables that it must have set | rank 0's address, for several hosts |
/// |---|---|---|
/// | flux's own | `FLUX_RANK`, `FLUX_WORLD_SIZE`, `FLUX_LOCAL_RANK`, `FLUX_RENDEZVOUS` | `FLUX_RENDEZVOUS` |
/// | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | `MASTER_ADDR` |
/// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` | `MASTER_ADDR` with `MASTER_PORT`, if set |
/// | MPICH, Hydra | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | `MASTER_ADDR` with `MASTER_PORT`, if set |
/// | Slurm (srun) | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_JOB_ID`, `SLURM_STEP_ID`, `SLURM_STEP_NUM_NODES` | first of `SLURM_STEP_NODELIST` |
///
/// They are asked in this order. Flux's own family wins. Of torchrun, Open MPI and MPICH the first
/// counts, and the others present must name the same rank and world size. Slurm counts only alone,
/// as everything inside a job inherits its variables. `FLUX_LAUNCHER` names the one that counts, or
/// `none`.
///
/// For any launcher: `FLUX_RENDEZVOUS` says where to meet, `FLUX_SECRET_FILE` or `FLUX_SECRET` is
/// the secret of ranks on several hosts, `FLUX_HOST_ID` sets ranks of one host apart, and
/// `FLUX_ADDRESS` is this host's address for the others. Without
/// `FLUX_RENDEZVOUS` rank 0 listens on the first free one of eight ports, from 20000 to 32000, that
/// follow from the launch; never on `MASTER_PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// This process's rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world: WorldSize,
    /// The rank among those of this host: the device to take where nothing else is said.
    pub local_rank: u32,
    /// Where the ranks meet.
    pub place: Place,
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// [`BootstrapError`]: no launcher, incomplete or contradictory variables, or ranks on several
    /// hosts without an address or a secret.
    pub fn read() -> Result<Self, BootstrapError> {
        Self::parse(&|name| std::env::var_os(name))
    }

    /// As [`read`](Self::read), of any set of variables.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, BootstrapError> {
        let vars = Variables { lookup };
        if let Some(name) = vars.get(FLUX_LAUNCHER).filter(|name| !name.is_empty()) {
            if name == NO_LAUNCHER {
                return Err(BootstrapError::NoLauncher);
            }
            if name == OWN_NAME {
                return Self::own(vars);
            }
            let named = LAUNCHERS.iter().chain([&SLURM_FAMILY]).find(|family| name == family.name);
            let family = named.ok_or_else(|| {
                vars.wrong(FLUX_LAUNCHER, "one of flux, torchrun, openmpi, mpich, slurm and none")
            })?;
            return Self::placed(vars, family, (family.read)(&vars)?);
        }
        if vars.any(&OWN[..3]) {
            return Self::own(vars);
        }
        let there = LAUNCHERS.iter().filter(|family| (family.is_there)(&vars));
        let placements = there
            .map(|family| Ok((family, (family.read)(&vars)?)))
            .collect::<Result<Vec<_>, BootstrapError>>()?;
        if let Some((first, others)) = placements.split_first() {
            if let Some(other) = others
                .iter()
                .find(|other| (other.1.rank, other.1.world) != (first.1.rank, first.1.world))
            {
                return Err(BootstrapError::Disagreement {
                    first: said(first.0, &first.1),
                    second: said(other.0, &other.1),
                });
            }
            return Self::placed(vars, first.0, first.1.clone());
        }
        if (SLURM_FAMILY.is_there)(&vars) {
            return Self::placed(vars, &SLURM_FAMILY, (SLURM_FAMILY.read)(&vars)?);
        }
        Err(BootstrapError::NoLauncher)
    }

    fn own(vars: Variables<'_>) -> Result<Self, BootstrapError> {
        vars.all(&OWN)?;
        let world = vars.world(FLUX_WORLD_SIZE)?;
        let rank = vars.below(FLUX_RANK, world.get(), FLUX_WORLD_SIZE)?;
        let local_rank = vars.below(FLUX_LOCAL_RANK, world.get(), FLUX_WORLD_SIZE)?;
        let place = Self::place_from(vars, true, &[])?;
        Ok(Self { rank: Rank::new(rank), world, local_rank, place })
    }

    /// What another launcher says, and where to meet.
    fn placed(
        vars: Variables<'_>,
        family: &LauncherFamily,
        placement: Placement,
    ) -> Result<Self, BootstrapError> {
        let Placement { rank, world, local_rank, one_host, rank_zero, launch } = placement;
        let names: Vec<&[u8]> = launch.iter().map(|value| value.as_encoded_bytes()).collect();
        let nonce = digest(&[&[family.name.as_bytes()], &names[..]].concat());
        let place = if !vars.value(FLUX_RENDEZVOUS).is_empty() {
            Self::place_from(vars, one_host, &names)?
        } else if one_host {
            Place::Host(HostPlace::below(&runtime_directory(vars.lookup), nonce))
        } else {
            let host = rank_zero.ok_or(BootstrapError::NoAddress { launcher: family.name })?;
            let taken = vars.get("MASTER_PORT").and_then(|port| port.to_str()?.parse().ok());
            Self::network(vars, Address::derived(host, nonce, taken), nonce)?
        };
        Ok(Self { rank: Rank::new(rank), world, local_rank, place })
    }

    fn place_from(
        vars: Variables<'_>,
        one_host: bool,
        launch: &[&[u8]],
    ) -> Result<Place, BootstrapError> {
        let value = vars.value(FLUX_RENDEZVOUS);
        let wanted = if one_host {
            "an absolute path or tcp://HOST:PORT"
        } else {
            "tcp://HOST:PORT, which ranks on several hosts need"
        };
        if let Some(address) = value.to_str().and_then(|text| text.strip_prefix("tcp://")) {
            let address =
                Address::parse(address).ok_or_else(|| vars.wrong(FLUX_RENDEZVOUS, wanted))?;
            if vars
                .get("MASTER_PORT")
                .and_then(|port| port.to_str()?.parse().ok())
                .is_some_and(|port| address.ports() == [port])
            {
                return Err(vars.wrong(
                    FLUX_RENDEZVOUS,
                    "another port than MASTER_PORT, where torchrun's own store listens",
                ));
            }
            return Self::network(
                vars,
                address,
                digest(&[&[value.as_encoded_bytes()], launch].concat()),
            );
        }
        let directory = PathBuf::from(value);
        if !one_host || !directory.is_absolute() {
            return Err(vars.wrong(FLUX_RENDEZVOUS, wanted));
        }
        Ok(Place::Host(HostPlace::at(directory, launch)))
    }

    fn network(
        vars: Variables<'_>,
        address: Address,
        launch: u128,
    ) -> Result<Place, BootstrapError> {
        let secret = Secret::from_variables(vars.lookup)?.ok_or(BootstrapError::NoSecret)?;
        let (directory, host_id) = (runtime_directory(vars.lookup), vars.get(FLUX_HOST_ID));
        let own_address = own_address(vars.lookup)?;
        let place = NetworkPlace { address, secret, launch, directory, host_id, own_address };
        Ok(Place::Network(place))
    }
}

fn said(family: &LauncherFamily, placement: &Placement) -> String {
    let [rank, world] = family.says;
    format!(
        "{} says that this is rank {} of {} ({rank}, {world})",
        family.name,
        placement.rank,
        placement.world.get()
    )
}

#[cfg(test)]
mod tests;
