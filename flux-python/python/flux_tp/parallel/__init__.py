"""Modules of PyTorch computed in parallel on a device mesh, with parameters that are DTensors."""

from ._loss import causal_lm_loss
from ._plans import parallelize
from ._styles import ColwiseParallel, Fused, RowwiseParallel, SequenceParallel

__all__ = ["ColwiseParallel", "Fused", "RowwiseParallel", "SequenceParallel", "causal_lm_loss", "parallelize"]
