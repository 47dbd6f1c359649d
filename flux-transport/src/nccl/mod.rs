//! NCCL collectives, from whatever library a machine has, without a panic where it has none.
//!
//! Invariant: at most one NCCL is loaded per process, and NVLink multicast (NVLS) is off in it unless the environment asks for it.
//! The library is found in this order: `FLUX_NCCL_LIB` (a file, or a folder), the loader's path, the PyTorch wheel of the virtual
//! environment or of the `python3` on the path, the system's library folder.

mod comm;
mod library;
mod search;

pub use comm::{Comm, ElementType, UniqueId};
pub use library::{NcclError, NcclUnavailable, available, version};
