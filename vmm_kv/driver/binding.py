"""What every binding of a GPU driver needs: to be looked at before it is used, and a thread's state put back after.

A package that is installed may still be of no use: built for another Python, cut short by a full disk, or another
package of the same name. Whatever its import raises, the caller is to hear what to install.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vmm_kv.errors import DriverGone, UnsupportedError

log = logging.getLogger(__name__)


class BrokenBinding(UnsupportedError):
    """The binding is installed and cannot be used. Installing it again is what helps."""


def broken(package: str, what: str) -> BrokenBinding:
    """package: what `pip` is to install, with its version. what: is wrong, "its import fails"."""
    name = package.partition(">")[0]
    return BrokenBinding(f"{name} is installed, but {what}; reinstall it: pip install --force-reinstall '{package}'")


def load(package: str, name: str, load_module: Callable[[], Any], needed: Sequence[str]) -> Any:
    """The module that `load_module` imports, once it has every name in `needed`.

    name: of the outermost package that has to be there. Raises `ModuleNotFoundError` where it or a part of it is not
    there, `BrokenBinding` for all else that is wrong.
    """
    try:
        module = load_module()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # extensions raise what they like, some of it no Exception
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name:
            raise
        raise broken(package, f"its import fails: {type(error).__name__}: {error}") from error
    if lacking := [function for function in needed if not hasattr(module, function)]:
        raise broken(package, f"lacks {', '.join(lacking[:3])}{', ...' if lacking[3:] else ''}")
    return module


def restore(where: str, what: str, undo: Callable[[], object]) -> None:
    """Puts a part of the calling thread's state back: tries twice, then warns and goes on.

    It raises no error. The operation before it has happened, and one that failed has an error of its own: neither is to
    be hidden by what could not be restored.
    """
    failed: Exception | None = None
    for _ in range(2):
        try:
            undo()
            return
        except Exception as error:
            failed = error
    if not isinstance(failed, DriverGone):  # what the state was good for is gone as well
        log.warning("this thread is left changed, since %s asked twice for %s: %s", where, what, failed)
