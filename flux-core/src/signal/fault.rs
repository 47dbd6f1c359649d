//! The record of a failed wait.
//!
//! Invariant: a rank's poison word goes from 0 to 1 once. The worker that sets it writes the fault
//! record.

use super::{Control, Word, Words};
use crate::layout::FaultRecord;

/// The call has failed on this rank, and its communicator must be rebuilt; [`read_fault`] gives the
/// reason.
#[derive(Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("the call has failed on this rank: see its fault record")]
pub struct Poisoned;

crate::debug_is_text!(Poisoned);

/// Poisons the call, and writes the record if this is the first failure.
pub(super) fn poison<S: Words>(words: &S, record: FaultRecord) -> Poisoned {
    if words.control(Control::Poison).claim(1) {
        let fields: [u32; 16] = bytemuck::cast(FaultRecord { state: 1, ..record });
        for (index, &field) in (0..).zip(&fields).skip(1) {
            words.fault(index).store_release(field);
        }
        words.fault(0).store_release(fields[0]);
    }
    Poisoned
}

/// The fault record of this rank, once complete. Any thread may call it at any time.
pub fn read_fault<S: Words>(words: &S) -> Option<FaultRecord> {
    let mut fields = [0; 16];
    for (index, field) in (0..).zip(&mut fields) {
        *field = words.fault(index).load_acquire();
        if index == 0 && *field == 0 {
            return None;
        }
    }
    Some(bytemuck::cast(fields))
}
