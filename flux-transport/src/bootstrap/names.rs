//! Names of environment variables.

/// The rank, in flux's own family.
pub const FLUX_RANK: &str = "FLUX_RANK";
/// The number of ranks, in flux's own family.
pub const FLUX_WORLD_SIZE: &str = "FLUX_WORLD_SIZE";
/// The rank among those of this host, in flux's own family.
pub const FLUX_LOCAL_RANK: &str = "FLUX_LOCAL_RANK";
/// Where the ranks meet: on one host a private directory (an absolute path, mode 0700, of this
/// user), on several `tcp://HOST:PORT` with an address of rank 0's host and a port that is free
/// there. Part of flux's own family, and says the same for every other launcher.
pub const FLUX_RENDEZVOUS: &str = "FLUX_RENDEZVOUS";
/// The launcher whose variables count, where several are there: `flux`, `torchrun`, `openmpi`,
/// `mpich` or `slurm`.
pub const FLUX_LAUNCHER: &str = "FLUX_LAUNCHER";
/// Takes part in this process's host id where it is set: ranks with different values count as on
/// different hosts. For tests, and to keep the memory of ranks apart that could share it. It says
/// nothing where the ranks meet in a directory, as they do when their launcher puts all of them on
/// one host and `FLUX_RENDEZVOUS` names no address: they are of one host then, whatever their
/// values.
pub const FLUX_HOST_ID: &str = "FLUX_HOST_ID";
/// The secret itself.
pub const FLUX_SECRET: &str = "FLUX_SECRET";
/// A file with the secret: of this user or root, closed to everybody else (mode 0600 or 0400).
pub const FLUX_SECRET_FILE: &str = "FLUX_SECRET_FILE";
