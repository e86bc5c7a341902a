"""The symbol check against small source trees, and the versions that are supported."""

from pathlib import Path

import pytest

from engine_hooks import symbols
from engine_hooks.symbol_check import find_package, missing_symbols

SOURCE = """
class Scheduler(Base):
    limit: int = 3
    kind = "a"

    def __init__(self, server_args, port=None):
        self.waiting = []
        self.first, self.second = 1, 2

    def run(self, batch, extra=None, *, mode="x"):
        self.late = batch

    @property
    def size(self):
        return 1

    def strict(self, batch, *, needed):
        pass


def helper(config=None):
    pass
"""


@pytest.fixture
def package(tmp_path):
    """Write a package with one module in a folder and one in an ``__init__``."""
    root = tmp_path / "engine"
    (root / "managers").mkdir(parents=True)
    (root / "plugins").mkdir()
    for folder in (root, root / "managers", root / "plugins"):
        (folder / "__init__.py").write_text("")
    (root / "managers" / "scheduler.py").write_text(SOURCE)
    (root / "plugins" / "__init__.py").write_text("def load(group):\n    pass\n")
    return root


S = "engine.managers.scheduler.Scheduler"


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        (f"{S}.limit", None),
        (f"{S}.kind", None),
        (f"{S}.waiting", None),
        (f"{S}.second", None),
        (f"{S}.late", None),
        (f"{S}.size", ("self",)),
        (f"{S}.run", None),
        (f"{S}.run", ("self", "batch")),
        (f"{S}.run", ("self", "batch", "extra")),
        (f"{S}.__init__", ("self", "server_args")),
        ("engine.managers.scheduler.helper", ("config",)),
        ("engine.plugins.load", ("group",)),
        (f"{S}.gone|{S}.run", ("self", "batch")),
    ],
)
def test_what_is_there_is_found(package, path, parameters):
    assert missing_symbols(package, [(path, parameters)]) == []


@pytest.mark.parametrize(
    ("path", "parameters", "fault"),
    [
        (f"{S}.gone", None, f"{S}.gone is missing"),
        (f"{S}.gone", ("self",), f"{S}.gone is missing"),
        (f"{S}.waiting", ("self",), f"{S}.waiting is missing"),
        ("engine.managers.scheduler.Other.run", None, "engine.managers.scheduler.Other.run"),
        ("engine.managers.gone.Scheduler", None, "engine.managers.gone.Scheduler is missing"),
        (f"{S}.run", ("self", "result"), "takes (self, batch), expected (self, result)"),
        (f"{S}.run", ("self",), "takes (self, batch), expected (self)"),
        (f"{S}.strict", ("self", "batch"), "takes (self, batch, needed), expected (self, batch)"),
        (f"{S}.gone|{S}.lost", None, f"{S}.gone is missing"),
    ],
)
def test_what_is_missing_or_differs_is_named(package, path, parameters, fault):
    (line,) = missing_symbols(package, [(path, parameters)])
    assert fault in line


def test_a_package_is_found_without_importing_it():
    assert find_package("controller") == Path(__file__).resolve().parents[1] / "controller"
    assert find_package("no_such_package") is None


def test_versions_compare_in_release_order():
    ordered = ["0.5.9", "0.5.15", "0.5.15.post1", "0.5.17", "0.5.23", "0.6.0", "1.0"]
    assert sorted(ordered, key=symbols.version_key) == ordered


def test_old_versions_are_refused_and_new_ones_need_every_symbol(package):
    (line,) = symbols.check_symbols("0.5.12.post1", package)
    assert "too old" in line
    faults = symbols.check_symbols("9.0", package)
    assert len(faults) == len(symbols.SYMBOLS)
    assert all(fault.startswith("SGLang 9.0: sglang.") for fault in faults)


def test_a_queue_that_each_rank_shortens_by_its_own_clock_is_not_read(monkeypatch):
    monkeypatch.delenv(symbols.WAITING_TIMEOUT, raising=False)
    assert not symbols.queues_differ_between_ranks("0.5.17")
    monkeypatch.setenv(symbols.WAITING_TIMEOUT, "30")
    assert symbols.queues_differ_between_ranks("0.5.17")
    assert not symbols.queues_differ_between_ranks("0.5.23")
    monkeypatch.setenv(symbols.WAITING_TIMEOUT, "-1")
    assert not symbols.queues_differ_between_ranks("0.5.17")
