"""Run a program that a model wrote: in a process of its own, with limits on time and memory, and no network.

A guard against accidents, not against an attacker: what the program may read is not limited. On Linux the process
leaves the network where the system lets it; everywhere, opening a socket or starting another process is an error in it.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["passed", "failed", "timed out"]

_CHILD = """
import sys
token, timeout, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source = sys.stdin.read()
import os
out = os.dup(1)
try:
    import resource
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: timeout + 1, resource.RLIMIT_FSIZE: 1 << 20}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)
except (ImportError, OSError, ValueError, AttributeError, TypeError):
    pass
forbidden = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.spawn", "os.kill")
def hook(event, args):
    if event.startswith(forbidden):
        raise PermissionError(event + " is not allowed here")
sys.addaudithook(hook)
sys.argv = ["program"]
exec(compile(source, "program", "exec"), {"__name__": "__main__"})
os.write(out, token.encode())
"""


@dataclass(frozen=True)
class Outcome:
    """Of one program.

    Attributes:
        verdict: `"passed"` if it ran to its end.
        detail: the last line that it wrote on the error stream.
    """

    verdict: Verdict
    detail: str = ""


def run_program(source: str, timeout_s: int = 10, memory_bytes: int = 1 << 29) -> Outcome:
    """Run Python source from its beginning to its end.

    Args:
        source: the program, with its tests. Ending early (`exit()`) is no pass.
        timeout_s: after which it is killed, with whatever it started.
        memory_bytes: of its address space, where the system can limit that.
    """
    token = secrets.token_hex(16)  # unknown to the program: only its end can write it
    arguments = [sys.executable, "-I", "-c", _CHILD, token, str(timeout_s), str(memory_bytes)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,
            text=True,
            errors="replace",
        )
        try:
            written, errors = process.communicate(source, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Outcome("timed out", f"after {timeout_s} s")
        finally:
            _kill(process)
    if process.returncode == 0 and written.endswith(token):
        return Outcome("passed")
    return Outcome("failed", next(iter(reversed(errors.strip().splitlines())), f"exit code {process.returncode}"))


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and its group, if any of it is left."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
    elif process.poll() is None:
        process.kill()
    process.wait()
