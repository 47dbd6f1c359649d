//! The views that a generation of a workspace has been seen in.
//!
//! Invariant: a view is made once for each size of places and half, so calls that are like earlier ones make none.

use crate::WorkspaceView;
use flux_core::signal::Epoch;
use std::sync::Arc;

/// Views of one generation.
#[derive(Debug)]
pub(super) struct Views {
    /// Of a call without an exchange.
    pub(super) plain: Arc<WorkspaceView>,
    // By bytes of a place and half: as many as there are ops of different sizes, twice.
    storing: Vec<((u64, usize), Arc<WorkspaceView>)>,
}

impl Views {
    pub(super) fn new(plain: WorkspaceView) -> Self {
        Self { plain: Arc::new(plain), storing: Vec::new() }
    }

    /// That of calls with places of this size in the half of `epoch`, made by `make` from the place's bytes and the half.
    pub(super) fn storing(&mut self, place_bytes: u64, epoch: Epoch, make: impl FnOnce(u64, u64) -> WorkspaceView) -> Arc<WorkspaceView> {
        let key = (place_bytes, epoch.half());
        if let Some((_, view)) = self.storing.iter().find(|(known, _)| *known == key) {
            return Arc::clone(view);
        }
        let view = Arc::new(make(place_bytes, epoch.half() as u64));
        self.storing.push((key, Arc::clone(&view)));
        view
    }
}
