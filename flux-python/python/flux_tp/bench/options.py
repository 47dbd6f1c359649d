"""What a run measures. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENGINES", "OF_MODELS", "PHASES", "Options"]

PHASES = {
    "prefill": (2048, 8192, 16384),
    "decode": (1, 8, 16, 64, 128, 256, 512),
    "train": (2048, 8192),
}
"""The phases of layers, each with its numbers of rows."""
OF_MODELS = {"steps": (2048, 8192), "prompt": (2048, 8192), "generate": (1, 16, 64)}
"""The phases of whole models, with tokens of a step or of a prompt, and numbers of prompts."""
ENGINES = ("default", "async_tp", "flux", "flux_sp")
"""How vLLM's layers are computed in its runs."""


@dataclass(frozen=True)
class Options:
    """The words of the command line."""

    models: Sequence[str]
    phases: Sequence[str]
    ms: Sequence[int] | None
    modes: Sequence[str]
    layers: int
    transport: str
    samples: int
    json: Path | None
    time_limit: float
    scales: str | None = None
    """Their form with 8-bit operands; ``None`` for bf16."""

    def rows(self, phase: str) -> Sequence[int]:
        """The numbers of rows of a phase."""
        return self.ms or {**PHASES, **OF_MODELS}[phase]
