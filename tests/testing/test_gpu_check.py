"""The checks of a real GPU, as far as they can be run without one: the runner, and each check on emulated drivers."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from vmm_kv import gpu_drivers, testing
from vmm_kv.demo.run import DemoOptions, DemoRun, run_demo
from vmm_kv.errors import UnsupportedError
from vmm_kv.testing import gpu_check, gpu_report
from vmm_kv.testing.gpu_checks import endings, modes, startup
from vmm_kv.testing.gpu_raw import CAPTURE_MODES, Raw
from vmm_kv.testing.gpu_registry import CHECKS, Check, Result, all_checks, check
from vmm_kv.testing.gpu_report import Report
from vmm_kv.testing.gpu_rig import Rig, open_rig, perform

pytestmark = pytest.mark.emulated

EMULATED = [name for name, check in all_checks().items() if check.emulated and not name.startswith("startup")]
REAL = [name for name, check in all_checks().items() if not check.emulated]
DEVICE = "cuda:0:512MiB"
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    yield monkeypatch
    endings.KEPT.clear()


def on_switched(monkeypatch: pytest.MonkeyPatch, name: str, **switches: int) -> Result:
    """The check on an emulated driver that has the switches, of which its quirks know nothing."""
    load = testing.load_cuda

    def loaded(**options: Any) -> Any:
        model = load(**options)
        for switch, value in switches.items():
            model.set(switch, value)
        return model

    monkeypatch.setattr(testing, "load_cuda", loaded)
    return perform(all_checks()[name], DEVICE, quick=True)


# The checks.


@pytest.mark.parametrize("device", [DEVICE, "hip:0:512MiB"])
@pytest.mark.parametrize("name", EMULATED)
def test_a_check_finds_nothing_on_an_emulated_driver(emulated: pytest.MonkeyPatch, name: str, device: str) -> None:
    result = perform(all_checks()[name], device, quick=True)
    if device.startswith("hip") and result.outcome == "skipped":
        assert name == "memory.pointer"
        return
    assert (result.outcome, result.name) == ("ok", name), result.facts
    assert result.facts
    json.dumps(result.to_dict())


@pytest.mark.parametrize("name", [name for name in EMULATED if name not in ("device.handle_types",)])
def test_a_check_knows_the_quirks_of_its_driver(emulated: pytest.MonkeyPatch, name: str) -> None:
    emulated.setenv("VMM_KV_TESTING", "quirks")
    result = perform(all_checks()[name], "hip:0:512MiB", quick=True)
    assert result.outcome == ("skipped" if name == "memory.pointer" else "ok"), result.facts


@pytest.mark.parametrize("name", REAL)
def test_a_check_of_real_hardware_is_skipped_on_an_emulated_driver(emulated: pytest.MonkeyPatch, name: str) -> None:
    result = perform(all_checks()[name], DEVICE)
    assert (result.outcome, result.facts) == ("skipped", "it needs a real GPU, the driver is emulated")


@pytest.mark.parametrize("backing", ["prefix", "alias"])
def test_the_start_up_is_the_demo_s(emulated: pytest.MonkeyPatch, backing: str, tmp_path: Path) -> None:
    """With a smaller model, and then with tokens that do not match."""
    small = tmp_path / "config.json"
    fields = json.loads((Path(startup.__file__).parents[2] / "demo" / "config.json").read_text())
    small.write_text(json.dumps({**fields, **SMALL}))
    asked: list[DemoOptions] = []
    runs: list[DemoRun] = []

    def smaller(options: DemoOptions) -> DemoRun:
        asked.append(options)
        if not runs:
            runs.append(run_demo(DemoOptions(options.device, options.backing, small)))
        return runs[0]

    emulated.setattr(startup, "run_demo", smaller)
    name = f"startup.{backing}"
    result = perform(all_checks()[name], "cuda:0:256MiB")
    assert (result.outcome, asked) == ("ok", [DemoOptions("cuda:0:256MiB", backing)]), result.facts
    object.__setattr__(runs[0].result, "tokens_match", False)
    result = perform(all_checks()[name], "cuda:0:256MiB")
    assert result.outcome == "failed" and result.facts.startswith("false: tokens_match")


@pytest.mark.parametrize(
    ("name", "switch", "outcome", "said"),
    [
        ("rules.mixed_access", "quirk_access_from_first", "failed", "It is B1"),
        ("rules.unmap", "quirk_joint_unmap_busy", "failed", "It is B2"),
        ("rules.memset", "quirk_single_memset", "failed", "It is B13"),
        ("memory.deltas", "quirk_memory_with_addresses", "surprise", "! release after unmap"),
        ("rules.hint", "ignore_hint", "surprise", "! times that addresses came back: 0"),
    ],
)
def test_a_departure_that_no_quirk_tells_of_is_found(
    emulated: pytest.MonkeyPatch, name: str, switch: str, outcome: str, said: str
) -> None:
    result = on_switched(emulated, name, **{switch: 1})
    assert (result.outcome, said in result.facts) == (outcome, True), result.facts


def test_a_quirk_that_does_not_show_is_a_surprise(emulated: pytest.MonkeyPatch) -> None:
    emulated.setenv("VMM_KV_TESTING", "quirks")
    for name, switch in (
        ("rules.mixed_access", "quirk_access_from_first"),
        ("rules.unmap", "quirk_joint_unmap_busy"),
        ("rules.memset", "quirk_single_memset"),
    ):
        with open_rig("hip:0:512MiB", all_checks()[name]) as rig:
            model_of(rig).set(switch, 0)
            all_checks()[name].function(rig)
            assert "shows: False" in rig.findings.line()
            rig.undo()


def model_of(rig: Rig) -> Any:
    """The emulated devices that a rig has opened."""
    memory: Any = rig.device.memory
    return memory._budget


def test_fresh_memory_that_is_not_zero_shows(emulated: pytest.MonkeyPatch) -> None:
    """C7."""
    result = on_switched(emulated, "memory.fresh", poison=1)
    assert result.details["dirty"] == [1.0, 1.0, 1.0]
    assert result.outcome == "ok", "CUDA's quirks promise nothing"


def test_refused_handle_types_are_told(emulated: pytest.MonkeyPatch) -> None:
    """C5: the attribute says yes, the create says no."""
    result = on_switched(emulated, "device.handle_types", fabric=1)
    assert result.outcome == "ok"
    assert "800" in result.details["fabric"] and "works" in result.facts


# Captures by hand: the binding is real, the captures are not.


class FakeRaw:
    """Captures that break where one of `breakers` is called in them; mapping calls are refused if it `refuses`."""

    breakers: tuple[str, ...] = ()
    refuses = False

    def __init__(self, rig: Rig) -> None:
        self._calls = rig.driver.calls
        self._raw = Raw(rig)
        self._model = model_of(rig)
        self._before: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def begin_capture(self, stream: int, mode: str) -> None:
        assert mode in CAPTURE_MODES
        self._before = dict(self._calls())
        self._model.set("capturing", int(self.refuses))

    def memset(self, address: int, value: int, size: int, stream: int) -> int:
        return 0

    def end_capture(self, stream: int) -> int:
        self._model.set("capturing", 0)
        after = self._calls()
        return 901 if any(after[name] > self._before[name] for name in self.breakers) else 0


def on_fake_captures(monkeypatch: pytest.MonkeyPatch, *breakers: str, refuses: bool = False) -> Result:
    monkeypatch.setattr(modes, "Raw", FakeRaw)
    monkeypatch.setattr(FakeRaw, "breakers", breakers)
    monkeypatch.setattr(FakeRaw, "refuses", refuses)
    monkeypatch.setitem(CHECKS, "modes.calls", _emulatable(CHECKS["modes.calls"]))
    return perform(CHECKS["modes.calls"], DEVICE)


def _emulatable(check: Check) -> Check:
    return Check(**{**vars(check), "emulated": True})


def test_calls_that_a_capture_does_not_mind(emulated: pytest.MonkeyPatch) -> None:
    result = on_fake_captures(emulated)
    assert result.outcome == "ok", result.facts
    assert len(result.details) == 12
    assert all(found == {"refused": {}, "broken": {}} for found in result.details.values())


def test_calls_that_break_a_capture(emulated: pytest.MonkeyPatch) -> None:
    """S1: a surprise, since the library's scope is meant to prevent it."""
    result = on_fake_captures(emulated, "unmap", "zero")
    assert result.outcome == "surprise"
    assert result.details["global, another thread, relaxed"] == {"refused": {}, "broken": {"zero": 901, "unmap": 901}}
    assert "! global, another thread, relaxed: broken by" in result.facts


def test_calls_that_are_refused_while_a_capture_goes_on(emulated: pytest.MonkeyPatch) -> None:
    """S1. Each call is made up for after the capture, so that the next has what it needs."""
    result = on_fake_captures(emulated, refuses=True)
    assert result.outcome == "surprise", result.facts
    for found in result.details.values():
        assert set(found["refused"].values()) == {900}
        assert {"reserve", "create", "map", "set_access", "unmap", "release"} <= set(found["refused"])


def test_the_binding_takes_what_the_captures_give_it(emulated: pytest.MonkeyPatch) -> None:
    """The emulated library has no captures: the binding says so, after it has taken the arguments."""
    with open_rig(DEVICE, all_checks()["tensors.moved"]) as rig, rig.driver.scope():
        raw = Raw(rig)
        raw.use()
        stream = raw.new_stream()
        with pytest.raises(UnsupportedError, match="cuStreamBeginCapture"):
            raw.begin_capture(stream, "thread_local")
        with pytest.raises(UnsupportedError, match="cuStreamEndCapture"):
            raw.end_capture(stream)
        graph = raw._api.CUgraph()
        for name, arguments in (
            ("cuGraphInstantiate", (graph, 0)),
            ("cuGraphLaunch", (raw._api.CUgraphExec(), stream)),
            ("cuGraphExecDestroy", (raw._api.CUgraphExec(),)),
            ("cuGraphDestroy", (graph,)),
        ):
            with pytest.raises(UnsupportedError, match=name):
                raw._binding.ask(getattr(raw._api, name), *arguments)


# The runner.

EXTRA = """
import atexit, os, signal, sys, threading
from vmm_kv.testing.gpu_registry import Skipped, check

def crash(rig):
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def spoil(rig):
    rig.spoil()
    rig.say("spoiled")
    atexit.register(os._exit, 4)

def lean(rig):
    rig.say("pid %d" % os.getpid())

def surprise(rig):
    rig.expect("colour", "red", "green")

def refuse(rig):
    raise Skipped("not here")

check("x.first", "1")(lean)
check("x.crash_shared", "1")(crash)
check("x.second", "1")(lean)
check("x.surprise", "1")(surprise)
check("x.skipped", "1")(refuse)
check("x.raises", "1")(lambda rig: rig.create(1))
check("x.third", "1")(lean)
check("x.crash", "1", alone=True)(crash)
check("x.hang", "1", alone=True)(lambda rig: threading.Event().wait())
check("x.ends_badly", "1", alone=True)(lambda rig: atexit.register(os._exit, 3))
check("x.spoils", "1", alone=True)(spoil)
check("x.variable", "1", alone=True, environment={"X_VARIABLE": "set"})(lambda rig: rig.say(os.environ["X_VARIABLE"]))
"""


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What the runner makes of checks that its workers register at their start."""
    folder = tmp_path_factory.mktemp("extra")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(EXTRA))
    script = "import sitecustomize, json; from vmm_kv.testing import gpu_registry as r\n"
    script += "print(json.dumps([[c.name, c.alone, dict(c.environment)] for c in r.CHECKS.values()]))"
    environment = {"PYTHONPATH": str(folder), "VMM_KV_TESTING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    checks = [
        Check(name, "1", "", "driver", alone, True, 1.0 if name == "x.hang" else 60.0, variables, lambda rig: None)
        for name, alone, variables in json.loads(done.stdout)
    ]
    told: list[Result] = []
    found = gpu_check.run_checks("cuda:0:64MiB", checks, limit=100, environment=environment, tell=told.append)
    assert sorted(told, key=lambda result: result.name) == sorted(found, key=lambda result: result.name)
    return found


def outcome(results: list[Result], name: str) -> tuple[str, str]:
    [result] = [result for result in results if result.name == name]
    return result.outcome, result.facts


def test_every_check_has_a_result_in_order(extra: list[Result]) -> None:
    assert [result.name for result in extra] == [
        "x.first", "x.crash_shared", "x.second", "x.surprise", "x.skipped", "x.raises", "x.third",
        "x.crash", "x.hang", "x.ends_badly", "x.spoils", "x.variable",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["x.crash", "x.crash_shared"])
def test_a_check_that_crashes_has_failed_with_its_signal(extra: list[Result], name: str) -> None:
    result, facts = outcome(extra, name)
    assert result == "failed"
    assert "was ended by SIGSEGV" in facts and "about to crash" in facts


def test_checks_share_a_process_until_one_fails(extra: list[Result]) -> None:
    facts = [outcome(extra, f"x.{name}") for name in ("first", "second", "third")]
    assert [result for result, _ in facts] == ["ok"] * 3
    assert len({said for _, said in facts}) == 3
    assert outcome(extra, "x.surprise") == ("surprise", "! colour: red, expected green")
    assert outcome(extra, "x.skipped") == ("skipped", "not here")


def test_an_error_of_the_driver_is_a_failure(extra: list[Result]) -> None:
    result, facts = outcome(extra, "x.raises")
    assert result == "failed" and facts.startswith("DriverError: create on cuda:0 failed")


def test_a_check_that_hangs_is_stopped(extra: list[Result]) -> None:
    assert outcome(extra, "x.hang") == ("failed", "took longer than 1 s: stopped")


def test_a_process_that_ends_badly_fails_its_check(extra: list[Result]) -> None:
    result, facts = outcome(extra, "x.ends_badly")
    assert result == "failed" and facts.startswith("its process ended with exit code 3 at its end")


def test_a_spoiled_process_is_not_asked_to_end_well(extra: list[Result]) -> None:
    assert outcome(extra, "x.spoils") == ("ok", "spoiled")


def test_a_check_has_its_environment(extra: list[Result]) -> None:
    assert outcome(extra, "x.variable") == ("ok", "set")


def test_checks_that_are_not_reached_are_not_run() -> None:
    checks = list(all_checks().values())
    results = gpu_check.run_checks("cuda:0", checks, limit=0.0)
    assert {result.outcome for result in results} == {"not run"}
    assert [result.name for result in results] == list(all_checks())


def test_two_checks_may_not_have_one_name() -> None:
    with pytest.raises(ValueError, match="two checks are called 'device'"):
        check("device", "")(lambda rig: None)


def test_the_checks_have_rules_limits_and_summaries() -> None:
    for name, found in all_checks().items():
        assert found.summary.endswith("."), name
        assert 0 < found.seconds <= 75
        assert found.rule or name.startswith("times.")


# What people and files are told.


def results() -> list[Result]:
    return [
        Result("device", "C1", "ok", 0.1, "NVIDIA H200", {"name": "NVIDIA H200 [test]"}),
        Result("rules.map", "M1", "surprise", 0.2, "! half of the handle: 0, expected 1"),
        Result("graphs.alias", "M5", "failed", 0.3, "after a replay [1, 2]"),
        Result("touch.replay", "S2", "not run", 0.0, "the time was up"),
    ]


def report(*found: Result) -> Report:
    return Report("cuda:0", False, 1.0, {"python": "3", "torch": {"version": None}}, found or tuple(results()))


def test_the_table_shows_every_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_report.show(report(), Console(width=100))
    shown = capsys.readouterr().out
    for word in ("NVIDIA H200 [test]", "surprise", "failed", "not run", "half of the handle", "a replay [1, 2]"):
        assert word in shown
    assert "1 ok, 1 surprise, 1 failed, 1 not run in 1 s" in shown


def test_the_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    report().write(path)
    read = json.loads(path.read_text())
    assert read["name"] == "NVIDIA H200 [test]"
    assert read["counts"] == {"ok": 1, "surprise": 1, "failed": 1, "not run": 1}
    assert [Result(**found) for found in read["checks"]] == results()


def test_the_file_is_called_after_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report().file_name == "gpu_nvidia_h200_test.json"
    assert report(results()[3]).file_name == "gpu_cuda_0.json"
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert gpu_report.default_path(report()) == tmp_path / "benchmarks" / "results" / "gpu_nvidia_h200_test.json"


def test_the_machine_is_told_without_its_name() -> None:
    facts = gpu_report.machine_facts("hip")
    assert facts["torch"]["version"] == str(torch.__version__)
    assert set(facts) == {"system", "python", "torch", "hip"}


# The command.


@pytest.mark.parametrize(("failing", "code"), [(False, 0), (True, 1)])
def test_the_exit_code_is_of_failures_alone(
    failing: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results() if failing else results()[:2]
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)
    monkeypatch.setattr(gpu_check, "run_checks", lambda *arguments, **options: found)
    path = tmp_path / "out.json"
    assert gpu_check.main(["--device", "cuda:0", "--output", str(path)]) == code
    assert f"written to {path}" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["checks"]) == len(found)


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan", "soon"])
def test_a_limit_that_cannot_be(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--device", "cuda:0", "--limit", limit])
    assert "--limit" in capsys.readouterr().err


@pytest.mark.parametrize("outcome", ["skipped", "not run"])
def test_where_no_check_ran_no_file_is_written(
    outcome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)
    nothing = [Result("device", "C1", outcome, 0.0, "")] * 2
    monkeypatch.setattr(gpu_check, "run_checks", lambda *arguments, **options: nothing)
    path = tmp_path / "out.json"
    assert gpu_check.main(["--output", str(path)]) == 2
    assert "no check ran" in capsys.readouterr().err
    assert not path.exists()


def test_an_output_that_cannot_be_written_is_told_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)
    monkeypatch.setattr(gpu_check, "run_checks", lambda *arguments, **options: pytest.fail("ran"))
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "out.json"):
        assert gpu_check.main(["--output", str(path)]) == 2
        assert f"{path} cannot be written: " in capsys.readouterr().err


def test_trying_an_output_does_not_touch_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    assert gpu_check._unwritable(path) is None
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("value", "said"), [("0", None), (" ", None), ("1", "VMM_KV_TESTING is set"), ("yes", "it is 1 or quirks")]
)
def test_only_a_mode_stands_for_emulated_drivers(value: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", value)
    monkeypatch.setattr(gpu_drivers, "count", lambda kind: 1)
    reason = gpu_check.missing("cuda:0")
    assert reason is None if said is None else said in str(reason)


def test_checks_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Check] = []
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)

    def noted(device: str, checks: list[Check], **options: Any) -> list[Result]:
        asked.extend(checks)
        return results()

    monkeypatch.setattr(gpu_check, "run_checks", noted)
    gpu_check.main(["--only", "rules.*", "--only", "device"])
    assert {found.name.partition(".")[0] for found in asked} == {"rules", "device"}
    assert gpu_check.main(["--only", "nonsense"]) == 2


@pytest.mark.parametrize(
    ("testing_mode", "said"), [("", "no cuda GPU is visible"), ("1", "VMM_KV_TESTING is set")], ids=["none", "emulated"]
)
def test_without_a_gpu_the_command_says_what_is_missing(testing_mode: str, said: str) -> None:
    if gpu_drivers.visible("cuda"):
        pytest.skip("a GPU is visible")
    command = [sys.executable, "-m", "vmm_kv.testing.gpu_check", "--device", "cuda:0"]
    environment = {**os.environ, "VMM_KV_TESTING": testing_mode}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: ") and said in done.stderr


@pytest.mark.parametrize("device", ["host", "cuda:one", "cpu:0"])
def test_what_is_no_gpu(device: str) -> None:
    assert "is no GPU" in str(gpu_check.missing(device))


def test_a_device_beyond_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_drivers, "visible", lambda kind: f"a {kind} GPU is visible")
    monkeypatch.setattr(gpu_drivers, "count", lambda kind: 1)
    assert gpu_check.missing("cuda:0") is None
    assert "there is no cuda:1" in str(gpu_check.missing("cuda:1"))


def test_a_package_without_its_compiled_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that hides the installed package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "from another folder" in str(gpu_check.missing("cuda:0"))


def test_the_default_device_is_the_gpu_that_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds, device in ((("hip",), "hip:0"), (("cuda", "hip"), "cuda:0"), ((), "cuda:0")):
        monkeypatch.setattr(gpu_drivers, "visible", partial(_visible, kinds))
        assert gpu_check.default_device() == device


def _visible(kinds: tuple[str, ...], kind: str) -> str | None:
    return kind if kind in kinds else None


def test_a_signal_is_named() -> None:
    from vmm_kv.testing.gpu_worker import _how_it_ended

    assert _how_it_ended(-signal.SIGABRT) == "was ended by SIGABRT"
    assert _how_it_ended(-63) == "was ended by signal 63"
