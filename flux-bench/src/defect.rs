//! What is wrong with a run that is made to see that it is found.

use crate::site::{OperandSet, Site};
use flux_kernels::Element;

/// Nothing, unless a test asks.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Defect {
    /// An element of each result that is checked is wrong on the last rank
    #[arg(long, hide = true)]
    pub spoil: bool,
}

impl Defect {
    /// Spoils what a call has left in `y`, when the stream has come past it.
    pub(crate) fn apply<T: Element>(self, site: &Site, set: &mut OperandSet<T>) -> anyhow::Result<()> {
        if !self.spoil || site.rank().get() + 1 < site.comm().world_size().get() {
            return Ok(());
        }
        let mut y = site.download(&set.y)?;
        if let Some(element) = y.last_mut() {
            *element = T::from_f32(f32::NAN);
        }
        site.upload(&mut set.y, &y)
    }
}
