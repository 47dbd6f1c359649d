//! Why a call to the driver failed: the call, the code and its name, never a type of the bindings.

/// `flux_core::debug_is_text`, which this crate is below.
macro_rules! debug_is_text {
    ($($error:ty),+) => {$(
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}
pub(crate) use debug_is_text;

/// The first version of CUDA, as `1000 * major + 10 * minor`, whose drivers have every entry point
/// that is called: `cuStreamGetCaptureInfo_v3` is the newest.
pub const OLDEST_DRIVER: u32 = 12_030;

/// Why this process cannot use CUDA.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum Unavailable {
    /// The driver's library cannot be loaded.
    #[error("the NVIDIA driver is not on this machine (tried {tried}): {reason}")]
    Library {
        tried: String,
        /// What the loader said of the first.
        reason: String,
    },
    /// The driver lacks an entry point: it is older than [`OLDEST_DRIVER`].
    #[error(
        "the NVIDIA driver has no `{symbol}`: a driver of CUDA {}.{} or newer is needed",
        OLDEST_DRIVER / 1000,
        OLDEST_DRIVER % 1000 / 10
    )]
    Symbol { symbol: &'static str },
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {call}: {name} ({code})")]
    Init { call: &'static str, code: i32, name: String },
    /// The driver is there and shows no device.
    #[error("the NVIDIA driver shows no device (CUDA_VISIBLE_DEVICES may hide them)")]
    NoDevice,
}

impl Unavailable {
    /// Whether a driver is there and does not work.
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Symbol { .. } | Self::Init { .. })
    }

    /// What a person can do about it, where that is known.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Init { code: 802, .. } => Some(
                "start the fabric manager of the driver's version (systemctl start \
                 nvidia-fabricmanager)",
            ),
            Self::Init { code: 803 | 804, .. } => Some(
                "the driver's library is not of the kernel module's version: restart the machine \
                 after an update, or start the container anew",
            ),
            Self::Init { .. } => {
                Some("look at nvidia-smi and at the kernel's log for what is wrong with the driver")
            }
            Self::Symbol { .. } => Some("update the driver"),
            Self::Library { .. } | Self::NoDevice => None,
        }
    }
}

/// A driver call that failed, or could not be made.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum CudaError {
    /// There is no CUDA in this process.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The driver refused a call.
    #[error("{call}: {name} ({code})")]
    Call { call: &'static str, code: i32, name: String },
    /// There is no such device in this process.
    #[error(
        "device {ordinal} does not exist: this process sees {count} devices, counted from 0 \
         (CUDA_VISIBLE_DEVICES may hide some)"
    )]
    NoSuchDevice { ordinal: u32, count: u32 },
    /// The device cannot do what is needed.
    #[error("device {ordinal} ({device}) does not support {what}")]
    Unsupported { ordinal: u32, device: String, what: &'static str },
    /// Calls of this process on the device did not end.
    #[error(
        "calls of this process on device {ordinal} have not ended: start a new process in its place"
    )]
    GivenUp { ordinal: u32 },
}

debug_is_text!(Unavailable, CudaError);

impl CudaError {
    /// Whether this process sees fewer devices than it needs.
    pub const fn is_too_few(&self) -> bool {
        matches!(self, Self::NoSuchDevice { .. } | Self::Unavailable(Unavailable::NoDevice))
    }

    /// The driver's result code, where a call failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } | Self::Unavailable(Unavailable::Init { code, .. }) => {
                Some(*code)
            }
            _ => None,
        }
    }
}
