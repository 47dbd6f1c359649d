"""Ranks as processes of this machine, which run cases on request.

A case is a function of one of the modules ``cases_*`` that every rank calls with the communicator. A rank answers with
nothing or a traceback, so a test fails with the words of the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE = 240.0
"""Seconds for one case: a busy machine and a first compilation take long, a hang does not end."""
GRACE = 30.0
"""Seconds more until ranks are killed that answer nothing, as they hang outside Python."""


class Ranks:
    """``world`` processes with the cases of ``modules``; ``options`` go to ``flux_tp.init``, ``environment`` to the processes."""

    def __init__(self, world: int, modules: str, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flux-test-")
        os.chmod(self._folder.name, 0o700)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank in range(world):
            variables = {
                "FLUX_RANK": rank,
                "FLUX_WORLD_SIZE": world,
                "FLUX_LOCAL_RANK": rank,
                "FLUX_RENDEZVOUS": self._folder.name,
                # For torch.distributed, which cases may ask.
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world,
                "OMP_NUM_THREADS": 1,
                # Multicast may fail the links of a whole host.
                "NCCL_NVLS_ENABLE": 0,
            }
            named = {name: str(value) for name, value in variables.items()}
            command = [sys.executable, str(HERE / "ranks.py"), modules, json.dumps(options)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, env=os.environ | named | (environment or {}), cwd=HERE, **pipes))

    def run(self, case: str, *without: int) -> None:
        """Has every rank run a case; fails with what they say. Ranks in ``without`` need not answer."""
        for process in self.processes:
            process.stdin.write(case + "\n")
            process.stdin.flush()
        words = []
        deadline = threading.Timer(PATIENCE + GRACE, self.kill)
        deadline.start()
        try:
            for rank, process in enumerate(self.processes):
                line = process.stdout.readline()
                if rank in without:
                    continue
                if not line:
                    words.append(f"rank {rank} has ended with {process.wait(GRACE)}")
                elif answer := json.loads(line):
                    words.append(f"rank {rank}:\n{answer}")
        finally:
            deadline.cancel()
        assert not words, "\n".join(words)

    def kill(self) -> None:
        """Ends the ranks at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Ends the ranks; each must end well unless it was killed."""
        for process in self.processes:
            process.stdin.close()
        try:
            ends = [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.kill()
            self._folder.cleanup()
        assert all(end in (0, -signal.SIGKILL) for end in ends), ends

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def serve(modules: str, options: dict[str, Any]) -> None:
    """Runs cases until there are no more."""
    # What cases print is no answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, _too_long)
    cases = {name: case for module in modules.split() for name, case in vars(import_module(module)).items()}
    import flux_tp

    comm = None
    for line in sys.stdin:
        signal.alarm(int(PATIENCE))
        answer = ""
        try:
            if comm is None:
                comm = flux_tp.init(**({"transport": "host"} | options))
                if comm.device is not None:
                    # As a program does: torch captures graphs on the current device.
                    import_module("torch").cuda.set_device(comm.device)
            cases[line.strip()](comm)
        except BaseException:  # noqa: BLE001 (the parent raises it)
            answer = traceback.format_exc()
        signal.alarm(0)
        answers.write(json.dumps(answer) + "\n")


def _too_long(*_: Any) -> None:
    raise AssertionError(f"the case has not ended after {PATIENCE} s")


def lateness() -> float:
    """How many times longer the machine takes for work, or for a wake-up, than one that is idle: 1 at least."""
    work = 0.05  # more than a scheduler's time slice
    began, until = time.monotonic(), time.thread_time() + work
    while time.thread_time() < until:
        pass
    worked = time.monotonic() - began
    began = time.monotonic()
    time.sleep(work)
    return max(1.0, worked / work, (time.monotonic() - began) / work)


def within(seconds: float, since: float) -> None:
    """Asserts that no more time has passed; on a late machine, as many times more as it is late."""
    passed = time.monotonic() - since
    late = 1.0 if passed < seconds else lateness()
    assert passed < seconds * late, f"{passed:.2f} s, and {seconds} s are the limit, on a machine that is {late:.1f} times late"


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
