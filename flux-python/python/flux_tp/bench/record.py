"""The record of a run, as JSON: what was measured where, then a row for each measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from typing import Any

import torch

from .. import __version__, _native
from .options import Options
from .ranks import Ranks

__all__ = ["Record"]

SCHEMA = 1


class Record:
    """A record that is whole in its file after every row. Rank 0 keeps it."""

    def __init__(self, ranks: Ranks, kind: str, options: Options, own: dict[str, Any]) -> None:
        cuda = ranks.device.type == "cuda"
        self._path = options.json
        self._content: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "gpus": ranks.world if cuda else 0,
            "driver": _driver() if cuda else None,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "flux_tp": __version__,
            "commit": _native.commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            # Absolute paths are this machine's: cut to the file's name.
            "command": " ".join(["python -m flux_tp.bench", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]),
            "transport": ranks.comm.transport,
            "ranks": "processes",
            "hosts": 1,
            "nccl_p2p": os.environ.get("NCCL_P2P_DISABLE", "0") != "1",
            "multicast": False,
            "samples": options.samples,
            **own,
            "rows": [],
        }

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes the record."""
        self._content["rows"].append(row)
        if self._path is not None:
            scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            scratch.write_text(json.dumps(self._content, indent=2) + "\n", encoding="utf-8")
            scratch.replace(self._path)


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None
