"""Two processes with two CPU devices each, joined by `jax.distributed`. Run as a module, once in each."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import COMPILE_FAST, ROOT

FLAGS = f"--xla_force_host_platform_device_count=2 {COMPILE_FAST}"
PATIENT = 3600
"""Seconds that JAX itself waits for heartbeats: our watch ends a process sooner in these tests."""
PAUSE = 0.1
SILENT = 8
"""In the place of `jax_bridge.hosts.watch.SILENT`, in beats of a second."""


class Ended(NamedTuple):  # how a process ended: its exit status, negative for a signal, and what it printed
    status: int
    out: str
    err: str


class Two:  # the two processes that run ``scenario`` of `support.host_scenarios`
    def __init__(self, folder: Path, scenario: str, *arguments: str):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        environment = os.environ | {"XLA_FLAGS": FLAGS, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._files = [[folder / f"{name}{rank}" for name in ("out", "err")] for rank in (0, 1)]
        self._processes = []
        for rank, (out, err) in enumerate(self._files):
            command = [sys.executable, "-m", "support.host_scenarios", str(rank), port, scenario, *arguments]
            with out.open("w") as stdout, err.open("w") as stderr:
                self._processes.append(
                    subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT)
                )

    def __enter__(self) -> "Two":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def signal(self, rank: int, number: signal.Signals) -> None:
        self._processes[rank].send_signal(number)

    def until(self, said: str, seconds: float = 900) -> None:
        for _ in range(int(seconds / PAUSE)):
            if all(said in out.read_text() for out, _ in self._files):
                return
            ended = [process.poll() for process in self._processes]
            assert ended == [None, None], [self.told(rank) for rank in (0, 1)]
            time.sleep(PAUSE)
        raise AssertionError([self.told(rank) for rank in (0, 1)])

    def end(self, rank: int, seconds: float = 900) -> Ended:
        for _ in range(int(seconds / PAUSE)):  # time in which all are stopped does not count
            if (status := self._processes[rank].poll()) is not None:
                return Ended(status, *self.told(rank))
            time.sleep(PAUSE)
        raise AssertionError(f"process {rank} hangs: {self.told(rank)}")

    def told(self, rank: int) -> tuple[str, str]:
        """The ends of a process's output and errors so far."""
        out, err = (file.read_text()[-4000:] for file in self._files[rank])
        return out, err
