//! The views that a generation of a workspace has been seen in.
//!
//! Invariant: a view is made once for each size and kind of places and half, so calls that are like
//! earlier ones make none.

use super::outbox::Storing;
use crate::backends::view::WorkspaceView;
use flux_core::signal::Epoch;
use std::sync::Arc;

/// Views of one generation.
#[derive(Debug)]
pub(super) struct Views {
    /// Of a call without an exchange.
    pub(super) plain: Arc<WorkspaceView>,
    // By what is stored, and half: as many as there are ops of different sizes, twice.
    storing: Vec<((Storing, usize), Arc<WorkspaceView>)>,
}

impl Views {
    pub(super) fn new(plain: WorkspaceView) -> Self {
        Self { plain: Arc::new(plain), storing: Vec::new() }
    }

    /// That of calls that store so in the half of `epoch`, made by `make` from that and the half.
    pub(super) fn storing(
        &mut self,
        storing: Storing,
        epoch: Epoch,
        make: impl FnOnce(Storing, u64) -> WorkspaceView,
    ) -> Arc<WorkspaceView> {
        let key = (storing, epoch.half());
        if let Some((_, view)) = self.storing.iter().find(|(known, _)| *known == key) {
            return Arc::clone(view);
        }
        let view = Arc::new(make(storing, epoch.half() as u64));
        self.storing.push((key, Arc::clone(&view)));
        view
    }
}
