"""Who may know what: only vmm_kv/driver names a driver, imports bring in nothing heavy, and no module grows too long.

A rule is a function from source text to findings, and is itself tried on a text that breaks it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vmm_kv
from vmm_kv import cli

PACKAGE = Path(vmm_kv.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = [path for path in MODULES if PACKAGE / "driver" not in path.parents]

DRIVER_NAME = re.compile(
    r"\b(?:cu|hip|ncu|hsa_amd_v)(?:Mem|Device|Ctx|Init|Stream|Get|Driver|mem_)\w*|\b(?:lib)(?:cuda|amdhip64)\b"
)
BINDINGS = {"cuda", "hip"}
# The emulated libraries are put in place by the names of their files.
LIBRARIES = {"libcuda", "libamdhip64"}
# Checks on a real GPU that ask the driver itself what it does, where the seam has no word for it.
BESIDE_THE_SEAM = {"testing/gpu_raw.py"}
# mem_info, charge, credit and the readings are the framework stand-in's to call as well.
PRIMITIVES = {"reserve", "create", "release", "map", "unmap", "set_access", "get_access", "free_address", "zero"}
LONGEST = 400


def driver_words(source: str) -> list[str]:
    """Names, attributes, imports and string constants that are a driver's function or a binding of one."""
    found: list[str] = []
    tree = ast.parse(source)
    prose = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found += DRIVER_NAME.findall(node.id)
        elif isinstance(node, ast.Attribute):
            found += DRIVER_NAME.findall(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found += DRIVER_NAME.findall(node.value)
            found += re.findall(r"\b(?:cuda\.bindings|cuda\.core|hip\.hip)\b", node.value)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in BINDINGS]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in BINDINGS:
            found.append(node.module or "")
    return found


def _docstrings(tree: ast.AST) -> list[ast.Constant]:
    """String constants that are statements of their own: prose, which may say what a driver calls a thing."""
    return [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]


def model_calls(source: str) -> list[str]:
    """Primitives named on a device model: `model.map`, `self._model.create`, `driver.model.zero`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PRIMITIVES:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_").endswith("model"):
                found.append(f"{name}.{node.attr}")
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_the_walk_sees_the_package() -> None:
    names = {relative(path) for path in MODULES}
    assert {"cache.py", "startup.py", "driver/host.py", "host/memory.py", "demo/engine.py"} <= names
    assert len(OUTSIDE) < len(MODULES)


@pytest.mark.parametrize("path", OUTSIDE, ids=relative)
def test_only_the_driver_package_names_a_driver(path: Path) -> None:
    source = path.read_text()
    words = set(driver_words(source))
    if PACKAGE / "testing" in path.parents:
        words -= LIBRARIES
    assert not words or relative(path) in BESIDE_THE_SEAM
    assert model_calls(source) == []


def imports_of_testing(source: str) -> list[str]:
    """What a module imports of `vmm_kv.testing`, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.startswith("vmm_kv.testing")]


def test_only_one_place_can_open_an_emulation() -> None:
    """It asks the environment first. Nothing else could put an emulated driver in place by accident."""
    outside = {
        relative(path)
        for path in MODULES
        if PACKAGE / "testing" not in path.parents and imports_of_testing(path.read_text())
    }
    assert outside == {"emulated.py"}
    assert imports_of_testing("def f():\n    import vmm_kv.testing.gpu_raw\n") == ["vmm_kv.testing.gpu_raw"]


@pytest.mark.parametrize(
    "line",
    [
        "cuMemCreate(1)",
        "lib.cuMemMap",
        "call('hipMemAddressReserve')",
        "from cuda.bindings import driver",
        "import cuda",
        "from hip import hip",
        "import_module('cuda.bindings.driver')",
        "import_module('hip.hip')",
        "lib = cdll('libcuda.so.1')",
        "x = 'cuMemSetAccess failed'",
    ],
)
def test_the_rule_on_names_finds_what_breaks_it(line: str) -> None:
    assert driver_words(f"def f():\n    {line}\n")


@pytest.mark.parametrize("line", ["torch.cuda.is_available()", "open_device('cuda')", "'''calls cuMemMap'''", "x.hip"])
def test_the_rule_on_names_leaves_the_rest_alone(line: str) -> None:
    assert not driver_words(f"def f():\n    {line}\n")


def test_the_rule_on_primitives_finds_what_breaks_it() -> None:
    source = (
        "model.map(1, 2, 0, 3)\nself._model.create(0, 1)\nf = driver.model.set_access\ncache.map(1)\nmodel.charge(0, 1)"
    )
    assert sorted(model_calls(source)) == ["_model.create", "model.map", "model.set_access"]
    assert model_calls((PACKAGE / "driver" / "host.py").read_text())


def imported_by(statements: str) -> set[str]:
    """Top-level modules there are after the statements, in a new interpreter."""
    script = f"import sys\n{statements}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statements",
    [
        "import vmm_kv\ndir(vmm_kv)",
        "import vmm_kv.budget",
        "import vmm_kv.spans",
        "import vmm_kv.layout",
        "import vmm_kv.errors",
        "import vmm_kv.gpu_drivers, vmm_kv.driver.cuda, vmm_kv.driver.hip",
        "import vmm_kv.memory_source, vmm_kv.doctor",
    ],
)
def test_an_import_brings_no_torch_and_no_binding(statements: str) -> None:
    """Invariant 14."""
    loaded = imported_by(statements)
    assert "vmm_kv" in loaded
    assert not loaded & {"torch", "numpy", *BINDINGS}


def test_the_host_device_runs_with_no_binding() -> None:
    """Invariant 14. None in `sys.modules` makes an import fail, as where nothing is installed."""
    absent = "".join(f"sys.modules['{name}'] = None\n" for name in BINDINGS)
    assert "torch" in imported_by(f"{absent}import vmm_kv\nvmm_kv.open_device('host:2MiB')")


def test_the_host_device_imports_no_binding() -> None:
    """Invariant 14. torch itself imports cuda.bindings where that is installed."""
    loaded = imported_by("import vmm_kv\nvmm_kv.open_device('host:2MiB')")
    assert loaded & BINDINGS == imported_by("import torch") & BINDINGS


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_stays_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LONGEST


def test_every_public_name_resolves_and_has_its_home_in_the_package() -> None:
    assert vmm_kv.__all__ == sorted(set(vmm_kv.__all__))
    for name in vmm_kv.__all__:
        found = getattr(vmm_kv, name)
        assert found.__name__ == name
        assert getattr(importlib.import_module(found.__module__), name) is found
        assert found.__module__.startswith("vmm_kv.")
    assert set(vmm_kv.__all__) <= set(dir(vmm_kv))


def test_what_signatures_and_messages_name_is_public() -> None:
    assert {
        *("BudgetError", "DriverGone", "MemoryReading", "Plan", "PreparedCommit", "RemapListener", "parse_bytes"),
    } <= set(vmm_kv.__all__)


def test_the_version_is_the_packages_and_is_looked_up_when_asked_for() -> None:
    assert vmm_kv.__version__ == importlib.metadata.version("vmm-kv")
    assert "__version__" not in vars(vmm_kv) and "__version__" in dir(vmm_kv)


def test_the_command_tells_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"vmm-kv {vmm_kv.__version__}\n")


def test_every_public_name_says_what_it_is() -> None:
    mute = []
    for name in vmm_kv.__all__:
        found = getattr(vmm_kv, name)
        members = vars(found).items() if isinstance(found, type) else ()
        named = {name: found, **{f"{name}.{key}": value for key, value in members if not key.startswith("_")}}
        mute += [
            key
            for key, value in named.items()
            if (callable(value) or isinstance(value, property)) and not value.__doc__
        ]
    assert mute == []


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vmm_kv.nonsense
