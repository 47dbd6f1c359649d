"""Ranks as processes of this machine, which run cases on request.

A case is a function of one of the modules ``cases_*`` that every rank calls with the communicator. A rank answers with
nothing or a traceback, so a test fails with the words of the ranks; of a rank that has died, with what it printed.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
PATIENCE = 240.0
"""Seconds for one case: a busy machine and a first compilation take long, a hang does not end."""
GRACE = 30.0
"""Seconds more until ranks are killed that answer nothing, as they hang outside Python."""
PRINTED = 20_000
"""Characters that are shown of what a rank printed before it died."""
HEAVY = [
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")),
]
"""What takes seconds of a processor to import: once, where ranks are forks of a process that has it."""


class Ranks:
    """``world`` processes with the cases of ``modules``; ``options`` go to ``flux_tp.init``, ``environment`` to the processes.

    With ``forked``, on the host transport, they are forks of one process that has imported what is heavy, and nothing of
    this package. A driver of GPUs is not for forks.
    """

    def __init__(self, world: int, modules: str, environment: dict[str, str] | None = None, forked: bool = False, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flux-test-")
        os.chmod(self._folder.name, 0o700)
        port = _port()
        context = multiprocessing.get_context("spawn")
        if forked and options.get("transport", "host") == "host":
            context = _forks()
        self.processes, self._ends, self._files = [], [], []
        for rank in range(world):
            variables = {
                "FLUX_RANK": rank,
                "FLUX_WORLD_SIZE": world,
                "FLUX_LOCAL_RANK": rank,
                "FLUX_RENDEZVOUS": self._folder.name,
                # Cases may ask torch.distributed.
                **_of_torchrun(rank, world, port),
                # Multicast may fail the links of a whole host.
                "NCCL_NVLS_ENABLE": 0,
            }
            named = {name: str(value) for name, value in variables.items()} | (environment or {})
            own, other = context.Pipe()
            file = Path(self._folder.name, f"{rank}.log")
            file.touch()
            process = context.Process(target=serve, args=(other, file, named, modules, options))
            process.start()
            # The rank's end alone: its death ends the connection.
            other.close()
            self.processes.append(process)
            self._ends.append(own)
            self._files.append(file)

    def run(self, case: str, *without: int) -> None:
        """Has every rank run a case; fails with what they say. Ranks in ``without`` need not answer."""
        for end in self._ends:
            end.send(case)
        words = []
        deadline = threading.Timer(PATIENCE + GRACE, self.kill)
        deadline.start()
        try:
            for rank, (process, end, file) in enumerate(zip(self.processes, self._ends, self._files, strict=True)):
                try:
                    answer = end.recv()
                except EOFError:
                    process.join(GRACE)
                    answer = f"it has ended with {process.exitcode}, and printed at last:\n{file.read_text(errors='replace')[-PRINTED:]}"
                if answer and rank not in without:
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
        for end in self._ends:
            end.close()
        try:
            for process in self.processes:
                process.join(PATIENCE)
            ends = [process.exitcode for process in self.processes]
        finally:
            self.kill()
            for file in self._files:
                sys.stderr.write(file.read_text(errors="replace"))
            self._folder.cleanup()
        assert all(end in (0, -signal.SIGKILL) for end in ends), ends

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def run_forked(world: int, call: Callable[..., object], *arguments: Any) -> None:
    """Has ranks call a function of a module as if torchrun had started them, as forks. Each must end well; fails with what they print."""
    context, port = _forks(), _port()
    with tempfile.TemporaryDirectory(prefix="flux-test-") as folder:
        files = [Path(folder, str(rank)) for rank in range(world)]
        variables = [{name: str(value) for name, value in _of_torchrun(rank, world, port).items()} for rank in range(world)]
        processes = [context.Process(target=_call, args=(*of_rank, call, arguments)) for of_rank in zip(variables, files, strict=True)]
        for process in processes:
            process.start()
        deadline, running = time.monotonic() + PATIENCE, set(processes)
        while running and not any(process.exitcode for process in processes) and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
            running = {process for process in running if process.exitcode is None}
        # As torchrun does where one has failed.
        for process in running:
            process.terminate()
            process.join(GRACE)
            process.kill()
            process.join()
        words = "\n".join(file.read_text() for file in files)
    ends = [process.exitcode for process in processes]
    assert not any(ends), f"{ends}\n{words}"


def _call(environment: dict[str, str], file: Path, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    _print_to(file)
    gc.freeze()
    sys.exit(call(*arguments))


def _print_to(file: Path) -> None:
    """Gives standard output and error of this process to a file."""
    with file.open("w") as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _of_torchrun(rank: int, world: int, port: int) -> dict[str, Any]:
    """Variables that torchrun sets."""
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}


def _forks() -> multiprocessing.context.BaseContext:
    """Starts the process that ranks are forks of, unless it runs. It has one thread, as a process that forks must."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


def serve(requests: Connection, printed: Path, environment: dict[str, str], modules: str, options: dict[str, Any]) -> None:
    """Runs cases until there are no more; what they print goes to a file."""
    os.environ.update(environment)
    os.chdir(HERE)
    _print_to(printed)
    faulthandler.enable(all_threads=True)
    signal.signal(signal.SIGALRM, _too_long)
    cases = {name: case for module in modules.split() for name, case in vars(import_module(module)).items()}
    import flux_tp

    # Collections need not look at what is imported.
    gc.freeze()
    comm = None
    while True:
        try:
            name = requests.recv()
        except EOFError:
            return
        signal.alarm(int(PATIENCE))
        answer = ""
        try:
            if comm is None:
                comm = flux_tp.init(**({"transport": "host"} | options))
                if comm.device is not None:
                    # As a program does: torch captures graphs on the current device.
                    import_module("torch").cuda.set_device(comm.device)
            cases[name](comm)
        except BaseException:  # noqa: BLE001 (the parent raises it)
            answer = traceback.format_exc()
        signal.alarm(0)
        requests.send(answer)


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
