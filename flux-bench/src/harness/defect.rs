//! What is wrong with a run that is made to see that it is found.

use crate::harness::{OperandSet, RankContext, elements};
use flux_kernels::Element;

/// Defects that tests ask for.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Defect {
    /// An element of each result that is checked is wrong on the last rank
    #[arg(long, hide = true)]
    pub spoil: bool,
}

impl Defect {
    /// Spoils what a call has left in the last weight's `y`, when the stream has come past it.
    pub(crate) fn apply<X, Y: Element>(
        self,
        ctx: &RankContext,
        set: &mut OperandSet<X, Y>,
    ) -> anyhow::Result<()> {
        if !self.spoil || ctx.rank().get() + 1 < ctx.comm().world_size().get() {
            return Ok(());
        }
        let (weight, holds) = (set.weights.len() - 1, set.holds);
        let last = &mut set.weights[weight].y;
        let mut y = ctx.download(last)?;
        // The set may hold room for more rows.
        let held =
            holds.map_or(y.len(), |held| elements(held.of_weight(weight).y_window(ctx.rank())));
        if let Some(element) = y[..held].last_mut() {
            *element = Y::from_f32(f32::NAN);
        }
        ctx.upload(last, &y)
    }
}
