//! Ranks of a torch ProcessGroup meet by what the group carries.

use async_trait::async_trait;
use flux_transport::{BootstrapError, Rendezvous};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Exchanges bytes by a callable of Python: `exchange(payload: bytes) -> list[bytes]`, by rank.
#[derive(Debug)]
pub(crate) struct GroupRendezvous {
    exchange: Py<PyAny>,
    /// What the callable has raised.
    raised: Mutex<Option<PyErr>>,
}

impl GroupRendezvous {
    pub(crate) const fn new(exchange: Py<PyAny>) -> Self {
        Self { exchange, raised: Mutex::new(None) }
    }

    /// What the callable has raised, as a KeyboardInterrupt, in place of the error that it became.
    pub(crate) fn take_raised(&self) -> Option<PyErr> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[async_trait]
impl Rendezvous for GroupRendezvous {
    /// The group's own timeout bounds the exchange, and the order of its collectives numbers it.
    async fn exchange(
        &self,
        _generation: u64,
        payload: Vec<u8>,
        _deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let given = Python::attach(|py| {
            self.exchange.call1(py, (PyBytes::new(py, &payload),))?.extract(py)
        });
        given.map_err(|raised: PyErr| {
            let source = raised.to_string().into();
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(raised);
            BootstrapError::Rendezvous { source }
        })
    }
}
