"""For every test: torch works on one thread; where its build is for a GPU, tests on emulated drivers are skipped."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch

from vmm_kv.errors import UnsupportedError

_REFUSED = "run tests on emulated drivers with a CPU build of torch"


def gpu_build() -> bool:
    """Whether torch was built for a GPU."""
    return bool(torch.version.cuda or torch.version.hip)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other in every small operation crawl when a core is taken by somebody else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "emulated: loads an emulated driver, in this process or one of its own")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if item.get_closest_marker("emulated") and gpu_build():
        pytest.skip(_REFUSED)
    yield from _skipping()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield from _skipping()


def _skipping() -> Generator[None, None, None]:
    """A refusal where torch really is a GPU build, and nothing else, is no failure of the test."""
    try:
        yield
    except UnsupportedError as error:
        if _REFUSED not in str(error) or not gpu_build():
            raise
        pytest.skip(str(error))
