"""What a person sees of the demo: a timeline, a memory ledger and the proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vmm_kv.budget import readable
from vmm_kv.console import Printer
from vmm_kv.demo.run import DemoRun, Tell

_BAR = 34
_COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "bright_black", "red")
_FILLS = "▓▒#=█·-"


@contextmanager
def progress() -> Iterator[Tell]:
    """Shows on stderr what the demo is doing, until the block ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def tell(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total or None)
            bars.update(tasks[phase], completed=done)

        yield tell


def show(run: DemoRun, console: Console | None = None) -> None:
    """Prints the run. Fits 80 columns and does without colour."""
    console = console or Printer()
    result = run.result
    console.print(
        Panel(
            Group(
                *_emulation(run), Text("Timeline", style="bold"), _timeline(run),
                Text("\nMemory ledger", style="bold"), _ledger(run), _counts(run),
                Text("\nProof", style="bold"), _proof(run),
            ),
            title=f"vmm-kv demo on {_device(run)}, {result.backing} backing",
            width=min(console.width, 96),
        )
    )  # fmt: skip


def _device(run: DemoRun) -> str:
    result = run.result
    return result.device if result.device.startswith("host") else f"{result.device} ({result.device_name})"


def _emulation(run: DemoRun) -> list[Text]:
    text = "The driver is EMULATED, tensors are on the CPU: no GPU took part.\n"
    return [Text(text, style="bold yellow")] if run.result.emulated else []


def _timeline(run: DemoRun) -> Table:
    phases = {**run.report.phases, **run.later}
    total = sum(phases.values()) or 1.0
    table = Table.grid(padding=(0, 1))
    table.add_column(style="cyan")
    table.add_column(width=_BAR)
    table.add_column(justify="right")
    before = 0.0
    for name, seconds in phases.items():
        start = int(_BAR * before / total)
        length = max(1, round(_BAR * seconds / total))
        table.add_row(name, Text(" " * min(start, _BAR - 1) + "━" * length, style="green")[:_BAR], f"{seconds:.3f} s")
        before += seconds
    return table


def parts(run: DemoRun) -> list[tuple[str, int]]:
    """The device's memory in parts that add up to its total, in bytes."""
    plan, report = run.report.plan, run.report
    captured = max(0, min(report.footprint, plan.own))
    inside = [
        ("weights and allocator", plan.own - captured),
        ("kept by captures", captured),
        *plan.terms.headroom,
        ("KV mapped", plan.cost),
        ("left over", plan.leftover),
    ]
    return [*inside, ("outside the share", plan.terms.total - sum(size for _, size in inside))]


def _ledger(run: DemoRun) -> Group:
    rows = parts(run)
    total = run.report.plan.terms.total
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    bar = Text()
    for i, (name, size) in enumerate(rows):
        fill, colour = _FILLS[i % len(_FILLS)], _COLOURS[i % len(_COLOURS)]
        bar.append(fill * max(1 if size > 0 else 0, round(70 * max(0, size) / total)), style=colour)
        table.add_row(Text(fill * 2, style=colour), name, readable(size), f"{100 * size / total:.1f} %")
    table.add_row("", "device", readable(total), "100.0 %")
    return Group(bar[:74], table)


def _counts(run: DemoRun) -> Text:
    result, plan = run.result, run.report.plan
    step = f"one more step costs {readable(result.next_step_bytes)}" if result.next_step_bytes else "at capacity"
    return Text(
        f"blocks    {result.profile_blocks} backed for capture → {run.report.planned_blocks} planned → "
        f"{result.final_blocks} granted (addresses for {result.capacity_blocks})\n"
        f"bound by  {result.bound_by} of {readable(plan.requested)}; {readable(plan.leftover)} left over, {step}\n"
        f"in use    {readable(result.used_bytes)}, peak while serving {readable(result.peak_used_bytes)}"
    )


def _proof(run: DemoRun) -> Table:
    table = Table.grid(padding=(0, 1))
    for good, text in run.result.proof():
        table.add_row(Text("yes", style="green") if good else Text("NO", style="bold red"), text)
    if run.result.too_small:
        table.add_row("", Text(run.result.too_small, style="bold"))
    return table
