"""Which version of a package is installed. Imports nothing of it."""

from __future__ import annotations

import importlib.metadata


def installed(package: str) -> str | None:
    """By what pip wrote of it; None where it wrote nothing, or nothing of that is left."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None
