"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


class Printer(Console):
    """rich's console, which would end the process itself where the reader of a pipe has enough."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled, which goes on to `vmm_kv.cli.main`."""
        raise
