"""Runs a program under limits, and tells whether it came to its end.

The source of this file is what a process of its own runs (`python -I -S -c`), with nothing but the
standard library. Arguments: seconds of CPU, bytes of memory. Standard input: a line that is written
to standard output if the program ends by itself without an error, then the program.
"""

import _thread
import os
import resource
import sys
import types

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv")
_FORBIDDEN = (
    "ctypes.",
    "mmap.",
    "os.",
    "pty.",
    "resource.",
    "shutil.",
    "signal.",
    "socket.",
    "subprocess.",
    "syslog.",
    "tempfile.",
)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Python tells of what it is about to do (PEP 578)."""
    if event == "open":
        flags = arguments[2]
        allowed = isinstance(flags, int) and not flags & _CHANGES
    elif event == "import":
        allowed = arguments[0] not in ("ctypes", "_ctypes", "_posixsubprocess")
    else:
        allowed = event in _READS or not event.startswith(_FORBIDDEN)
    if not allowed:
        raise PermissionError(f"{event} is not allowed here")


def _no_thread(*_arguments: object, **_options: object) -> None:
    # Not every version of Python tells of threads, and not every user is limited in processes.
    raise RuntimeError("can't start new thread")


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def main() -> None:
    token, _, source = sys.stdin.buffer.read().partition(b"\n")
    result = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _limit(int(sys.argv[1]), int(sys.argv[2]))
    code = compile(source, "program", "exec")
    program = types.ModuleType("program")
    sys.modules["program"] = program
    for name in ("start_new_thread", "start_new", "start_joinable_thread"):
        setattr(_thread, name, _no_thread)
    sys.addaudithook(_refuse)
    exec(code, program.__dict__)
    os.write(result, token)


if __name__ == "__main__":
    main()
