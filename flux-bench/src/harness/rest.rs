//! `--rest`: a pause before each timed call.

use std::time::Duration;

/// How long, if at all.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Rest {
    /// Milliseconds of rest before each timed call, so that the card is further from its power
    /// limit; with 50 and more NVLink sleeps
    #[arg(id = "rest", long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub ms: Option<u64>,
}

impl Rest {
    /// Sleeps for so long.
    pub(crate) fn take(self) {
        if let Some(ms) = self.ms {
            std::thread::sleep(Duration::from_millis(ms));
        }
    }
}
