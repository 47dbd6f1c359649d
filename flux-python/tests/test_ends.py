"""How ranks meet and end: groups, workers of a fork, Ctrl-C in a wait. Without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SOON = 1.0
"""Seconds until a wait has ended."""

HEAD = """
import multiprocessing, os, sys, time
import numpy as np
import flux_tp

def rank(rank, body):
    os.environ.update(FLUX_RANK=str(rank), FLUX_LOCAL_RANK=str(rank))
    comm = flux_tp.init(transport="host", timeout=60)
    x, w = np.ones((2, 32), np.float16), np.ones((16, 32), np.float16)
    call = lambda: flux_tp.all_gather_matmul(x, w)
    exec(body, {"comm": comm, "call": call, "flux_tp": flux_tp, "os": os, "time": time, "sys": sys})

def forked(number, body, leave):
    child = os.fork()
    if child == 0:
        rank(number, body)
        leave()
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def worker(how, number, body):
    process = multiprocessing.get_context(how).Process(target=rank, args=(number, body))
    process.start()
    def end():
        process.join()
        return process.exitcode
    return end
"""


def run(program: str, **environment: str) -> subprocess.Popen[str]:
    folder = tempfile.mkdtemp(prefix="flux-test-")
    variables = {"FLUX_WORLD_SIZE": "2", "FLUX_RENDEZVOUS": folder} | environment
    path = Path(folder) / "program.py"
    path.write_text(HEAD + program)
    return subprocess.Popen(
        [sys.executable, str(path)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends_well(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err


# Rank 0 outlives rank 1, and asks whether anything is wrong.
STAYS = "call(); time.sleep(1); comm.check()"


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("leaves", ["call()", "call(); comm.close()"])
def test_a_worker_of_multiprocessing_that_ends_is_no_lost_peer(how: str, leaves: str) -> None:
    program = f"""
if __name__ == "__main__":
    ends = [worker({how!r}, 0, {STAYS!r}), worker({how!r}, 1, {leaves!r})]
    sys.exit(any([end() for end in ends]))
"""
    ends_well(run(program))


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_child_of_a_fork_that_ends_is_no_lost_peer(leave: str) -> None:
    # Nothing runs in a process that `_exit` ends: it has closed its communicator before.
    leaves = "call(); comm.close()" if "_exit" in leave else "call()"
    program = f"""
if __name__ == "__main__":
    ends = [forked(0, {STAYS!r}, lambda: os._exit(0)), forked(1, {leaves!r}, lambda: {leave})]
    sys.exit(any([end() for end in ends]))
"""
    ends_well(run(program))


def test_a_child_of_a_rank_that_ends_changes_nothing() -> None:
    body = """
child = os.fork()
if child == 0:
    comm.close()
    sys.exit(0)
os.waitpid(child, 0)
call()
comm.check()
"""
    program = f"""
if __name__ == "__main__":
    ends = [worker("fork", number, {body!r}) for number in range(2)]
    sys.exit(any([end() for end in ends]))
"""
    ends_well(run(program))


GROUP = """
import os, sys, time, types
from pathlib import Path
import flux_tp

number, folder, times = int(sys.argv[1]), Path(sys.argv[2]), 0

def all_gather_object(given, payload, group=None):
    # As torch's, over files.
    global times
    times += 1
    part = folder / f"{number}.part"
    part.write_bytes(payload)
    part.rename(folder / f"{times}-{number}")
    for rank in range(len(given)):
        path = folder / f"{times}-{rank}"
        while not path.exists():
            time.sleep(0.001)
        given[rank] = path.read_bytes()

dist = types.ModuleType("torch.distributed")
dist.get_rank, dist.get_world_size, dist.all_gather_object = lambda group: number, lambda group: 2, all_gather_object
dist.ProcessGroup = type("ProcessGroup", (), {})
dist.GroupMember = types.SimpleNamespace(NON_GROUP_MEMBER=-100)
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch.distributed"] = sys.modules["torch"].distributed = dist

def connect(transport="host"):
    connected = flux_tp._init._connect_group(dist.ProcessGroup(), transport, 10.0, None, None, (64, 0, False))
    return flux_tp.Communicator(connected, (64, 0, False), 10.0, None)
"""


def grouped(number: int, folder: str, program: str, *before: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", GROUP + program, str(number), folder],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="flux-test-") as folder:
        yield Path(folder)


def test_groups_that_meet_and_close_leave_no_folder(short: Path) -> None:
    program = """
for _ in range(20):
    with connect() as comm:
        comm.barrier()
"""
    (short / "exchange").mkdir()
    (short / "tmp").mkdir()
    where = {"TMPDIR": str(short / "tmp"), "XDG_RUNTIME_DIR": str(short / "tmp")}
    for process in [grouped(number, str(short / "exchange"), program, **where) for number in range(2)]:
        ends_well(process)
    assert not list((short / "tmp").iterdir())


def test_ranks_without_a_common_folder_are_on_hosts_apart(short: Path) -> None:
    apart = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$0" "$@"']
    (short / "exchange").mkdir()
    (short / "tmp").mkdir()
    where = {"TMPDIR": str(short / "tmp"), "XDG_RUNTIME_DIR": ""}
    if subprocess.run([*apart, "true"], env=os.environ | where, capture_output=True).returncode:
        pytest.skip("this user may not mount a folder of its own")
    program = """
began = time.monotonic()
try:
    connect()
except flux_tp.ConnectError as error:
    assert "are on different hosts" in str(error), error
    assert time.monotonic() - began < 5
else:
    raise AssertionError("memory was shared")
"""
    ranks = [grouped(number, str(short / "exchange"), program, *apart[: 5 * number], **where) for number in range(2)]
    for process in ranks:
        ends_well(process)


def test_a_rank_that_cannot_be_met_tells_the_others_at_once(tmp_path: Path) -> None:
    program = """
began = time.monotonic()
try:
    connect()
except flux_tp.ConnectError as error:
    assert "192.0.2.7" in str(error), error
    assert ("rank 1 cannot be met" in str(error)) == (number == 0), error
    assert time.monotonic() - began < 5
else:
    raise AssertionError("no host has this address")
"""
    ranks = [
        grouped(number, str(tmp_path), program, FLUX_ADDRESS="192.0.2.7" if number else "") for number in range(2)
    ]
    for process in ranks:
        ends_well(process)


INTERRUPTED = """
import signal
print("waits", flush=True)
began = time.monotonic()
try:
    {wait}
except KeyboardInterrupt:
    print(f"ended {{time.monotonic() - began}}", flush=True)
"""
ABORTED = """
time.sleep(1)
try:
    for _ in range(600):
        comm.check()
        time.sleep(0.05)
except flux_tp.AbortedError as error:
    assert error.ranks == (0,) and error.reason == 130, (error.ranks, error.reason)
else:
    raise AssertionError("rank 0 was not interrupted")
"""


@pytest.mark.parametrize("wait", ["comm.barrier()", "call()"])
def test_ctrl_c_ends_a_wait_and_the_peers_are_told(wait: str) -> None:
    built = "call()\n" if wait == "call()" else ""
    body = built + INTERRUPTED.format(wait=wait)
    folder = tempfile.mkdtemp(prefix="flux-test-")
    waits, told = (
        run(f'rank({number}, {text!r})', FLUX_RENDEZVOUS=folder) for number, text in ((0, body), (1, built + ABORTED))
    )
    assert waits.stdout is not None
    assert waits.stdout.readline() == "waits\n"
    time.sleep(0.3)
    began = time.monotonic()
    waits.send_signal(signal.SIGINT)
    line = waits.stdout.readline()
    late = time.monotonic() - began
    ends_well(told)
    ends_well(waits)
    assert line.startswith("ended ") and late < SOON, (line, late)


def test_ctrl_c_ends_the_wait_of_init() -> None:
    program = """
try:
    print("waits", flush=True)
    rank(0, "")
except KeyboardInterrupt:
    print("ended", flush=True)
"""
    process = run(program)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    line = process.stdout.readline()
    late = time.monotonic() - began
    ends_well(process)
    assert line == "ended\n" and late < SOON, (line, late)
