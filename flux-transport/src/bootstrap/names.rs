//! Names of environment variables.

/// The rank, in flux's own family.
pub const FLUX_RANK: &str = "FLUX_RANK";
/// The number of ranks, in flux's own family.
pub const FLUX_WORLD_SIZE: &str = "FLUX_WORLD_SIZE";
/// The rank among those of this host, in flux's own family.
pub const FLUX_LOCAL_RANK: &str = "FLUX_LOCAL_RANK";
/// Where the ranks meet, for every launcher. On one host a private directory: absolute path, mode
/// 0700, of this user. On several `tcp://HOST:PORT`, an address and a free port of rank 0's host.
pub const FLUX_RENDEZVOUS: &str = "FLUX_RENDEZVOUS";
/// The launcher to believe where several are present: `flux`, `torchrun`, `openmpi`, `mpich` or
/// `slurm`. `none` ignores all of them.
pub const FLUX_LAUNCHER: &str = "FLUX_LAUNCHER";
/// Part of this process's host id: ranks with different values count as on different hosts. Ignored
/// where the ranks meet in a directory, which puts them on one host.
pub const FLUX_HOST_ID: &str = "FLUX_HOST_ID";
/// This host's address for ranks of other hosts, where its own name or its route to them is not it.
pub const FLUX_ADDRESS: &str = "FLUX_ADDRESS";
/// The secret itself.
pub const FLUX_SECRET: &str = "FLUX_SECRET";
/// A file with the secret: of this user or root, closed to everybody else (mode 0600 or 0400).
pub const FLUX_SECRET_FILE: &str = "FLUX_SECRET_FILE";
