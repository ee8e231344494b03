"""What a person sees of `vmm-kv doctor`: a table of kinds, one of devices, and what to do."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vmm_kv.budget import readable
from vmm_kv.console import Printer
from vmm_kv.doctor import WORKS, DeviceFacts, Diagnosis, KindFacts


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints the diagnosis. Fits 80 columns and does without colour."""
    console = console or Printer()
    console.print(f"vmm-kv {diagnosis.vmm_kv}, Python {diagnosis.python}, {diagnosis.system}", highlight=False)
    console.print(f"torch {diagnosis.torch}", highlight=False)
    console.print(_kinds(diagnosis))
    for kind in diagnosis.kinds:
        for device in kind.devices:
            console.print(_device(device))
    _todo(diagnosis, console)


def _kinds(diagnosis: Diagnosis) -> Table:
    table = Table("device", "usable", "binding", "driver", "runtime", "devices", box=None, pad_edge=False)
    for kind in diagnosis.kinds:
        answer = Text("yes", style="green") if kind.usable else Text("no", style="yellow")
        versions = [kind.versions.get(name, "-") for name in ("driver", "runtime")]
        table.add_row(kind.kind, answer, _binding(kind), *versions, str(len(kind.devices)))
    return table


def _binding(kind: KindFacts) -> str:
    """The first of its packages that is installed: a program may have the one that is needed and not the other."""
    if not kind.packages:
        return "none needed"
    found = (f"{name} {version}" for name, version in kind.packages.items() if version)
    return next(found, "not installed")


def _device(device: DeviceFacts) -> Table:
    told = "" if device.granule_recommended is None else f", recommended {readable(device.granule_recommended)}"
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(f"\n{device.name}", style="bold"), f"\n{device.model}")
    rows = [
        ("memory", f"{readable(device.free)} free of {readable(device.total)}, by {device.source}"),
        *(("", note) for note in device.notes),
        ("virtual memory", f"works; granule {readable(device.granule)}{told}"),
        *((f"handles {name}", answer) for name, answer in device.handle_types.items()),
        ("RDMA", "yes" if device.rdma else "no"),
        ("quirks", ", ".join(device.quirks) or "none"),
    ]
    identity = [f"UUID {device.uuid}"] * bool(device.uuid) + [f"PCI {device.pci}"] * bool(device.pci)
    if identity:
        rows.insert(0, ("identity", ", ".join(identity)))
    for name, value in rows:
        table.add_row(f"  {name}", Text(value, style="" if value != WORKS else "green"))
    return table


def _todo(diagnosis: Diagnosis, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for kind in diagnosis.kinds:
        for shortfall in kind.shortfalls:
            table.add_row(kind.kind, Text(shortfall.what))
            table.add_row("", Text(f"-> {shortfall.todo}", style="cyan"))
    if table.row_count:
        console.print(Text("\nWhat is missing, and what to do", style="bold"))
        console.print(table)
    else:
        console.print("\nNothing is missing.")
