"""Programs that do not pass, and do no harm."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tightkv.errors import EngineError
from tightkv.evaluation.tasks import sandbox
from tightkv.evaluation.tasks.sandbox import ProgramLimits, run_program

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=5)

IMPORTS = (
    "collections copy dataclasses datetime decimal functools hashlib heapq itertools math random "
    "re statistics string typing"
)


def test_a_right_program_passes() -> None:
    program = "\n".join(f"import {name}" for name in IMPORTS.split())
    program += """
@dataclasses.dataclass
class Pair:
    first: "int"

def double(pair: Pair) -> int:
    print("x" * 1_000_000)
    return 2 * pair.first

assert double(Pair(4)) == 8
assert hashlib.md5(b"a").hexdigest().startswith("0cc1")
if __name__ == "__main__":
    raise SystemExit
"""
    assert run_program(program)


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "raise SystemExit",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0); raise ValueError",
        "def f(:",
        "x = '\0'",
        "def f(): f()\nf()",
        "x = bytearray(10 * 2**30)",
        "input()",
        "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass",
        "print('0' * 32, flush=True); raise SystemExit",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes",
        "import threading; threading.Thread(target=print).start()",
        "import numpy",
    ],
)
def test_a_wrong_program_does_not_pass(program: str) -> None:
    assert not run_program(program, LIMITS)


def test_an_endless_loop_ends_by_its_processor_time() -> None:
    begin = time.monotonic()
    assert not run_program("while True: pass", ProgramLimits(cpu_seconds=1, wall_seconds=600))
    assert time.monotonic() - begin < 100


def test_a_program_that_waits_ends_by_the_clock() -> None:
    assert not run_program("import time; time.sleep(600)", ProgramLimits(wall_seconds=0.5))


def test_a_fork_bomb_makes_no_process() -> None:
    # Passes only if no child was made: each would run on and fail.
    program = """
import os
for _ in range(100):
    try:
        child = os.fork()
    except Exception:
        child = None
    assert child is None
"""
    assert run_program(program, LIMITS)


def test_files_are_neither_written_nor_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w').write('x' * 10**10)",
        f"import os; os.open({str(tmp_path / 'new')!r}, os.O_CREAT)",
        f"import os; os.remove({str(kept)!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import pathlib; pathlib.Path({str(kept)!r}).write_text('')",
        "open('here', 'w').write('x' * 10**10)",
    ):
        assert not run_program(program, LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "kept"


def test_environment_and_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTKV_SECRET", "1")
    program = """
import os
assert "TIGHTKV_SECRET" not in os.environ
assert os.listdir() == []
"""
    assert run_program(program, LIMITS)


def test_without_namespaces_the_network_stays_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    sandbox._isolation.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert run_program("pass", LIMITS)
        assert "audit hook alone" in caplog.text
        for address in ("('127.0.0.1', 9)", "('localhost', 9)"):
            program = f"""
import socket
try:
    socket.create_connection({address})
except PermissionError:
    raise SystemExit
"""
            assert not run_program(program.replace("raise SystemExit", "assert False"), LIMITS)
            assert run_program(program.replace("raise SystemExit", "pass"), LIMITS)
    finally:
        sandbox._isolation.cache_clear()


def test_a_machine_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_run", lambda *_arguments: False)
    sandbox._isolation.cache_clear()
    with pytest.raises(EngineError, match="leave humaneval out"):
        run_program("pass")
    sandbox._isolation.cache_clear()
