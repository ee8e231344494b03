"""Processes that checks run in, so that one that crashes, hangs or spoils the device's context harms no other.

The parent starts `python -m vmm_kv.testing.gpu_worker DEVICE FD` and writes names of checks to its stdin, a line each.
The worker answers on the file descriptor, a line of JSON each; the first line says that it is ready.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from vmm_kv.testing.gpu_registry import SPOILED, Check, Result, all_checks

_END_SECONDS = 20.0
_READY = "ready"


class Worker:
    """One such process. `run` any number of checks until it `died`, then `end` it."""

    def __init__(self, device: str, *, quick: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self.died = False
        self._ready = False
        self._buffer = b""
        reading, writing = os.pipe()
        self._answers = reading
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-X", "faulthandler", "-m", __name__, device, str(writing)]
        self._process = subprocess.Popen(
            command + ["--quick"] * quick,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(writing,),
            env={**os.environ, **(environment or {})},
        )
        os.close(writing)

    def get_ready(self, seconds: float) -> bool:
        """Waits until torch is imported. False where that took longer or failed: the first `run` tells more."""
        if not self._ready:
            self._ready = self._line(time.monotonic() + seconds) == _READY
        return self._ready

    def run(self, check: Check, seconds: float) -> Result:
        """The check's result. One that crashes its process, or takes longer than `seconds`, has failed."""
        start = time.monotonic()
        deadline = start + seconds
        line = self._ask(check.name, deadline)
        spent = round(time.monotonic() - start, 3)
        if line is not None:
            return Result(**json.loads(line))
        self.died = True
        if time.monotonic() >= deadline:
            self._process.kill()
            return Result(check.name, check.rule, "failed", spent, f"took longer than {seconds:.0f} s: stopped")
        how = _how_it_ended(self._process.wait())
        return Result(check.name, check.rule, "failed", spent, f"its process {how}. {self._last_words()}".strip())

    def end(self, seconds: float = _END_SECONDS) -> str | None:
        """Lets the process end. Returns how it ended where that was not well, or None; also after it `died`."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout=seconds)
            how = None if self.died or code == 0 else f"its process {_how_it_ended(code)} at its end"
            if how:
                how = f"{how}. {self._last_words()}".strip()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            how = f"its process did not end within {seconds:.0f} s"
        self._output.close()
        os.close(self._answers)
        return how

    def _ask(self, name: str, deadline: float) -> str | None:
        if not self.get_ready(deadline - time.monotonic()):
            return None
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._line(deadline)

    def _line(self, deadline: float) -> str | None:
        """The next line, None at the deadline or where the process has closed its end."""
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 65536) if readable else b""
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        fatal = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        # A crash is followed by every thread's stack and by the names of a hundred modules.
        words = lines[-4:] if fatal is None else lines[max(0, fatal - 2) : fatal + 5]
        return f"Its last words: {' | '.join(words)[:600]}" if words else ""


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def main(arguments: list[str]) -> int:
    """The worker's side."""
    device, number, quick = arguments[0], int(arguments[1]), "--quick" in arguments[2:]
    from vmm_kv.testing.gpu_rig import perform  # imports torch, which takes seconds

    checks = all_checks()
    with os.fdopen(number, "w", buffering=1) as answers:
        print(_READY, file=answers)
        for line in sys.stdin:
            result = perform(checks[line.strip()], device, quick=quick)
            print(json.dumps(result.to_dict(), default=str), file=answers)
            if result.details.get(SPOILED):
                answers.flush()
                os._exit(0)  # nothing of the device can be undone any more, and trying would look like a crash
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
