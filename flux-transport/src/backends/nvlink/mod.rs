//! NVLink: ranks' kernels store into each other's memory, and copy engines push.
//!
//! Call: order after the last call; for rows fork a side stream, copy and flag there, join it.

mod transport;

pub(crate) use transport::NvLink;
