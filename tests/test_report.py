"""A report of a start-up on disk: everything comes back, and what is no report is told."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmm_kv.budget import Plan, Terms
from vmm_kv.decode import decode
from vmm_kv.device import open_host
from vmm_kv.fingerprint import Fingerprint
from vmm_kv.layout import TensorSpec
from vmm_kv.measure import MemoryReading
from vmm_kv.report import StartupReport
from vmm_kv.request import Request
from vmm_kv.startup import Startup

MIB = 1 << 20
KV = TensorSpec("kv", (2, None, 16, 64), torch.bfloat16)


def report_of(**options: Any) -> StartupReport:
    device = open_host(16 * MIB, granule=4096)
    fingerprint = Fingerprint.of(device, model={"name": "né"}, ladder=["full 2", "full 1"])
    startup = Startup(device, fingerprint=fingerprint, **options)
    with startup.load():
        weights = torch.ones(MIB, dtype=torch.uint8)
    startup.reserve([KV], 100)
    startup.back(2)
    with startup.capture():
        pass
    with startup.worst_step():
        torch.ones(weights.numel(), dtype=torch.uint8)
    return startup.commit()


@cache
def sample() -> StartupReport:
    return report_of(utilization=0.7, headroom={"safety": 3})


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """A start-up collects garbage at each reading; what torch has imported need not be walked each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("options", [{}, {"kv_bytes": MIB}, {"blocks": 7}, {"utilization": 0.123456789}])
def test_a_saved_report_comes_back_equal(options: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(**options)
    report.save(tmp_path / "report.json")
    loaded = StartupReport.load(str(tmp_path / "report.json"))
    assert loaded == report
    assert loaded.to_json() == report.to_json()
    assert loaded.table() == report.table()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_saving_again_replaces_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report_of(blocks=7).save(path)
    before = path.read_text()
    sample().save(path)
    assert StartupReport.load(path) == sample()
    assert path.read_text() != before


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    sample().save(path)

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="disk full"):
        report_of(blocks=7).save(path)
    assert StartupReport.load(path) == sample()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON, perhaps cut short"),
        ("{", "no JSON, perhaps cut short"),
        ("[1, 2]", "not a saved start-up report, which StartupReport.save writes"),
        ('{"hidden_size": 64}', "not a saved start-up report"),
        ('{"format": NaN}', "NaN stands where a number is expected"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff\xfe", "no JSON"),
    ],
)
def test_what_is_no_report_is_told_with_its_path(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"report.json: .*{said}"):
        StartupReport.load(path)


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x80\x81\x00")
    with pytest.raises(ValueError, match=r"binary: .*utf-8"):
        StartupReport.load(tmp_path / "binary")
    with pytest.raises(FileNotFoundError):
        StartupReport.load(tmp_path / "missing")


def test_a_report_cut_short_anywhere_is_told(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sample().save(path)
    text = path.read_text().rstrip()
    for end in range(0, len(text), 97):
        path.write_text(text[:end])
        with pytest.raises(ValueError, match="cut short"):
            StartupReport.load(path)


def _set(*keys: Any) -> Callable[[Any], None]:
    *way, last, value = keys

    def change(data: Any) -> None:
        for key in way:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("version", 2), r"of version 2, this vmm_kv reads version 1"),
        (lambda data: data.pop("version"), "of version None"),
        (lambda data: data["report"].pop("blocks"), "report: blocks missing"),
        (_set("report", "colour", 1), "report: 'colour' not known"),
        (_set("report", "blocks", "7"), r"report\.blocks: '7' is no int"),
        (_set("report", "blocks", True), r"report\.blocks: True is no int"),
        (_set("report", "blocks", 7.5), r"report\.blocks: 7\.5 is no int"),
        (_set("report", "phases", "load", None), r"report\.phases\.load: None is no float"),
        (_set("report", "plan", "status", "fine"), r"report\.plan\.status: 'fine' is no 'ok' or"),
        (_set("report", "plan", "terms", "headroom", 0, ["a"]), r"report\.plan\.terms\.headroom\[0\]: 1 items, not 2"),
        (
            _set("report", "plan", "terms", "reserved", -5),
            r"report\.plan\.terms: reserved must not be negative",
        ),
        (_set("report", "plan", "request", "blocks", 3), r"report\.plan\.request: give exactly one of"),
        (_set("report", "readings", 1, "free", None), r"report\.readings\[1\]\.free: None is no int"),
        (_set("report", "caches", {}), r"report\.caches: {} is no list"),
        (_set("report", None), r"report: None is no object"),
        (_set("report", "phases", "load", 10**400), "too large for a float"),
        (_set("version", True), "of version True"),
        (_set("report", "blocks", 0), "report: blocks must be at least 1, got 0"),
        (_set("report", "blocks", 101), "report: 101 blocks granted, there are addresses for 100"),
        (_set("report", "mapped_bytes", -1), "report: mapped_bytes must be at least 1, got -1"),
        (_set("report", "captures", -1), "report: captures must be at least 0, got -1"),
        (_set("report", "backing", "hope"), "report: backing 'hope' is none: prefix, alias, none"),
        (_set("report", "readings", []), "report: readings: at least one is expected"),
        (_set("report", "tries", []), "report: tries: at least one is expected"),
        (_set("report", "caches", []), "report: caches: at least one is expected"),
        (_set("report", "caches", 0, "unit", 0), r"report\.caches\[0\]: unit must be at least 1, got 0"),
        (
            _set("report", "plan", "terms", "headroom", [["a", 1], ["a", 2]]),
            r"report: plan\.terms\.headroom: two items have one name: a, a",
        ),
    ],
)
def test_a_field_that_makes_no_sense_is_named(change: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sample().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"report.json: .*{said}"):
        StartupReport.load(path)


def _leaves(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        return [leaf for key, item in items for leaf in _leaves(item, (*where, key))]
    return [where]


def test_no_field_may_be_an_object_of_another_kind(tmp_path: Path) -> None:
    """Whatever single value is spoilt, it is a ValueError and nothing else."""
    path = tmp_path / "report.json"
    sample().save(path)
    text = path.read_text()
    for leaf in _leaves(json.loads(text)):
        data = json.loads(text)
        _set(*leaf, [{"x": 1}])(data)
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"report\.json"):
            StartupReport.load(path)


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none() | st.integers())
def test_any_reading_comes_back(free: int, seconds: float, label: str, used: int | None) -> None:
    reading = MemoryReading(label, free, 1, 2, 3, 4, seconds, used, notes=(label,), told=(free, 1))
    data = json.loads(json.dumps({**vars(reading), "notes": [label], "told": [free, 1]}))
    assert decode(MemoryReading, data) == reading


def test_a_request_comes_back_with_its_one_field() -> None:
    for request in (Request(utilization=0.9), Request(kv_bytes=5), Request(blocks=5)):
        assert decode(Request, vars(request)) == request


def test_plan_and_terms_hold_only_what_comes_back() -> None:
    """A field of a kind that cannot be read back would be found when a report is loaded: this finds it here."""
    data = json.loads(json.dumps(sample().plan.to_dict()))
    assert decode(Plan, data) == sample().plan
    assert decode(Terms, data["terms"]) == sample().plan.terms


def test_a_folder_that_is_not_there_is_told_with_the_path_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.json"
    with pytest.raises(FileNotFoundError) as raised:
        sample().save(path)
    assert raised.value.filename == str(path)
