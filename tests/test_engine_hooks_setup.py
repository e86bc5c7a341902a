"""Settings, entry point, what is set on a server, launcher and benchmark, without SGLang."""

import functools
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from controller.calibration import Calibration
from controller.checkpoint import save_checkpoint
from controller.errors import ConfigError, SpecGovernorError
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.policy import parameter_shapes
from controller.tiers import tier_of
from engine_hooks import bench_decision, launch, mode, plugin, symbols
from engine_hooks.server_setup import ServerSetup
from engine_hooks.settings import Settings
from engine_hooks.verify import missing_hooks

CALIBRATION = Path("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "small"
    shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, 4, 4)
    save_checkpoint(
        folder,
        parameters={name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
        tiers=[tier_of(name) for name in ("cold", "1", "5")],
        calibration=Calibration.load(CALIBRATION),
        training_config={},
        evaluation={},
    )
    return folder


# --- settings ------------------------------------------------------------------------------------


def test_without_a_policy_or_a_trace_there_is_nothing_to_do():
    assert Settings.from_environment({}).idle
    assert Settings.from_environment({"SPECGOVERNOR_MODE": "on"}).idle
    assert not Settings.from_environment({"SPECGOVERNOR_TRACE": "t.jsonl"}).idle
    assert not Settings.from_environment({"SPECGOVERNOR_POLICY": "p"}).idle


def test_settings_are_read(tmp_path):
    found = Settings.from_environment(
        {
            "SPECGOVERNOR_POLICY": str(tmp_path),
            "SPECGOVERNOR_MODE": " Shadow ",
            "SPECGOVERNOR_STRICT": "1",
            "SPECGOVERNOR_DECISIONS": "log.jsonl",
            "SPECGOVERNOR_CALIBRATION": "mine.json",
            "SPECGOVERNOR_TIERS": "off,1",
            "SPECGOVERNOR_REPEAT": " 3 ",
        }
    )
    assert found == Settings(
        tmp_path,
        "shadow",
        strict=True,
        guard=True,
        repeat=3,
        decisions=Path("log.jsonl").absolute(),
        calibration=Path("mine.json").absolute(),
        tiers="off,1",
    )
    assert not Settings.from_environment({"SPECGOVERNOR_GUARD": "no"}).guard
    assert Settings.from_environment({"SPECGOVERNOR_POLICY": "p"}).mode == "on"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPECGOVERNOR_MODE", "yes"),
        ("SPECGOVERNOR_STRICT", "maybe"),
        ("SPECGOVERNOR_GUARD", "2"),
        ("SPECGOVERNOR_REPEAT", "0"),
        ("SPECGOVERNOR_REPEAT", "65"),
        ("SPECGOVERNOR_REPEAT", "2.5"),
        ("SPECGOVERNOR_REPEAT", "-1"),
    ],
)
def test_a_setting_that_is_none_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Settings.from_environment({name: value})


# --- the entry point -----------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    """Stand in for SGLang's registry; return what is registered."""
    hooks = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around", REPLACE="replace")
    registry.HookRegistry = SimpleNamespace(
        register=lambda target, hook, kind: hooks.__setitem__(target, kind)
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(symbols, "check_symbols", list)
    monkeypatch.setattr(symbols, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(symbols, "resolution_target", lambda: f"{symbols.SERVER_ARGS}.resolve_once")
    for name in (
        "POLICY", "CALIBRATION", "TIERS", "MODE", "STRICT", "GUARD", "REPEAT", "TRACE", "DECISIONS"
    ):  # fmt: skip
        monkeypatch.delenv(f"SPECGOVERNOR_{name}", raising=False)
    return hooks


def test_nothing_is_registered_without_a_policy(registered):
    plugin.register()
    assert registered == {}


GOVERNED = (
    "AdaptiveSpeculativeParams __init__ on_idle process_batch_result resolve_once run_batch "
    "set_internal_state"
)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"SPECGOVERNOR_POLICY": "p"}, GOVERNED),
        # It can be switched on later.
        ({"SPECGOVERNOR_POLICY": "p", "SPECGOVERNOR_MODE": "off"}, GOVERNED),
        (
            {"SPECGOVERNOR_TRACE": "t"},
            "__init__ on_idle process_batch_result resolve_once run_batch",
        ),
    ],
)
def test_hooks_are_registered_for_what_is_asked(registered, monkeypatch, env, names):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert sorted(target.rsplit(".", 1)[1] for target in registered) == names.split()
    assert registered.get(symbols.PARAMS, "replace") == "replace"


def test_a_missing_symbol_leaves_the_server_alone_and_is_said(registered, monkeypatch, caplog):
    monkeypatch.setenv("SPECGOVERNOR_POLICY", "p")
    monkeypatch.setattr(symbols, "check_symbols", lambda: ["a is missing", "b is missing"])
    plugin.register()
    assert registered == {}
    (record,) = caplog.records
    assert "does NOT govern SGLang 0.5.23" in record.message
    assert record.message.endswith("a is missing; b is missing")
    monkeypatch.setenv("SPECGOVERNOR_STRICT", "1")
    with pytest.raises(SystemExit, match="a is missing"):
        plugin.register()


@pytest.mark.parametrize(
    "env",
    [
        {"SPECGOVERNOR_STRICT": "1", "SPECGOVERNOR_MODE": "onn"},
        {"SPECGOVERNOR_STRICT": "on", "SPECGOVERNOR_GUARD": "maybe"},
        {"SPECGOVERNOR_STRICT": "yess"},
    ],
)
def test_strict_holds_also_where_a_setting_is_misspelt(registered, monkeypatch, env):
    for name, value in {"SPECGOVERNOR_POLICY": "p", **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="does NOT govern"):
        plugin.register()


def test_an_error_while_registering_is_said(registered, monkeypatch, caplog):
    def fails(settings):
        raise RuntimeError("planted")

    monkeypatch.setenv("SPECGOVERNOR_POLICY", "p")
    monkeypatch.setattr(plugin, "install", fails)
    plugin.register()
    assert "does NOT govern" in caplog.text
    assert "RuntimeError: planted" in caplog.text
    monkeypatch.setenv("SPECGOVERNOR_STRICT", "1")
    with pytest.raises(SystemExit, match="planted"):
        plugin.register()


def test_the_flag_of_the_guard_overrules_the_environment():
    ours, _ = launch.parse(["--policy", "p", "--governor-guard", "on"])
    assert ours["SPECGOVERNOR_GUARD"] == "on"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9", "refused"),
        ("http://h:abc", "nonnumeric port"),
        ("http://a b", "control characters|can't contain"),
        ("nowhere", "unknown url type"),
    ],
)
def test_a_server_that_cannot_be_asked_gives_one_line(capsys, url, reason):
    assert mode.main([url, "on"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line)


# --- what is set on a server ---------------------------------------------------------------------


def server_args(**more):
    fields = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_adaptive": False,
        "speculative_adaptive_config": None,
        "max_running_requests": 64,
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.fixture(autouse=True)
def supported(monkeypatch):
    monkeypatch.setattr(symbols, "unsupported_reason", lambda server_args: None)


def test_the_candidate_steps_are_the_policys_and_the_servers_own(checkpoint):
    args = server_args()
    seen = []
    done = ServerSetup(Settings(checkpoint, "on")).resolve(
        lambda given: seen.append(given.speculative_adaptive) or "done", args
    )
    assert done == "done"
    assert seen == [True]
    config = json.loads(Path(args.speculative_adaptive_config).read_text())
    assert config == {"1": {"candidate_steps": [0, 1, 3, 5]}}


def test_another_calibration_and_its_tiers_can_be_given(checkpoint):
    for tiers, steps in ((None, [0, 1, 2, 3, 5, 7]), ("off,2", [0, 2, 3])):
        args = server_args()
        settings = Settings(checkpoint, "on", calibration=CALIBRATION, tiers=tiers)
        ServerSetup(settings).resolve(lambda given: None, args)
        config = json.loads(Path(args.speculative_adaptive_config).read_text())
        assert config == {"1": {"candidate_steps": steps}}
    for settings, reason in (
        (Settings(checkpoint, "on", calibration=Path("none.json")), "none.json"),
        (Settings(checkpoint, "on", tiers="off,4"), "4"),
    ):
        with pytest.raises(SpecGovernorError, match=reason):
            settings.load_policy()


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_other_modes_prepare_for_on(checkpoint, monkeypatch, caplog, mode):
    args = server_args()
    ServerSetup(Settings(checkpoint, mode)).resolve(lambda given: None, args)
    assert args.speculative_adaptive
    monkeypatch.setattr(symbols, "unsupported_reason", lambda server_args: "enable_pdmux=True")
    ServerSetup(Settings(checkpoint, mode)).resolve(lambda given: None, server_args())
    assert "cannot be switched on later" in caplog.text
    assert "enable_pdmux=True" in caplog.text


def test_a_child_process_has_its_settings_already(checkpoint):
    args = server_args(_resolution_finished=True)
    ServerSetup(Settings(checkpoint, "on")).resolve(lambda given: None, args)
    assert not args.speculative_adaptive


def test_what_sglang_would_switch_off_is_an_error(checkpoint, monkeypatch):
    monkeypatch.setattr(symbols, "unsupported_reason", lambda server_args: "enable_pdmux=True")
    with pytest.raises(ConfigError, match="enable_pdmux=True"):
        ServerSetup(Settings(checkpoint, "on")).resolve(lambda given: None, server_args())


def test_the_limit_that_sglang_sets_is_named(checkpoint, caplog):
    setup = ServerSetup(Settings(checkpoint, "on"))
    setup.resolve(lambda given: None, server_args())
    assert caplog.records == []
    setup.resolve(lambda given: None, server_args(max_running_requests=None))
    assert "at most 48 requests" in caplog.text


@pytest.mark.parametrize(
    ("policy", "more", "reason"),
    [
        ("nowhere", {}, "expected a checkpoint directory"),
        (None, {"speculative_algorithm": None}, "without --speculative-algorithm"),
        (None, {"pp_size": 2}, "pipeline parallelism"),
    ],
)
def test_a_server_that_cannot_be_governed_stays_as_it_was(checkpoint, caplog, policy, more, reason):
    path = checkpoint if policy is None else checkpoint.with_name(policy)
    args = server_args(**more)
    ServerSetup(Settings(path, "on")).resolve(lambda given: None, args)
    assert args == server_args(**more)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=reason):
        ServerSetup(Settings(path, "on", strict=True)).resolve(lambda given: None, args)


# --- verification --------------------------------------------------------------------------------


def wrap(original, hook):
    """Wrap as SGLang does."""

    @functools.wraps(original)
    def wrapper(*args):
        return hook(original, *args)

    return wrapper


def test_a_hook_is_found_under_others_and_missed_where_it_is_not(monkeypatch):
    class Scheduler:
        def run(self):
            pass

    class Params:
        pass

    module = ModuleType("fake_engine")
    module.Scheduler, module.Params = Scheduler, Params
    monkeypatch.setitem(sys.modules, "fake_engine", module)

    def mine(original, *args):
        return original(*args)

    def other(original, *args):
        return original(*args)

    hooks = {"fake_engine.Scheduler.run": mine, "fake_engine.Params": Params}
    assert missing_hooks(hooks) == ["fake_engine.Scheduler.run"]
    Scheduler.run = wrap(Scheduler.run, mine)
    assert missing_hooks(hooks) == []
    Scheduler.run = wrap(Scheduler.run, other)
    assert missing_hooks(hooks) == []
    module.Params = type("Params", (), {})
    assert missing_hooks(hooks) == ["fake_engine.Params"]
    assert missing_hooks({"fake_engine.gone": mine}) == ["fake_engine.gone"]


# --- the launcher --------------------------------------------------------------------------------


def test_the_command_line_is_split():
    ours, theirs = launch.parse(
        "--policy p --governor shadow --governor-strict --governor-guard off "
        "-- --model-path m --port 1".split()
    )
    assert ours == {
        "SPECGOVERNOR_POLICY": "p",
        "SPECGOVERNOR_MODE": "shadow",
        "SPECGOVERNOR_STRICT": "1",
        "SPECGOVERNOR_GUARD": "off",
    }
    assert theirs == ["--model-path", "m", "--port", "1"]
    ours, theirs = launch.parse(["--model-path", "m", "--policy", "p", "--tp-size=2"])
    assert ours == {"SPECGOVERNOR_POLICY": "p", "SPECGOVERNOR_MODE": "on"}
    assert theirs == ["--model-path", "m", "--tp-size=2"]
    ours, _ = launch.parse("--policy p --governor-repeat 1".split())
    assert ours["SPECGOVERNOR_REPEAT"] == "1"


def test_without_sglang_the_launcher_says_so(monkeypatch, capsys):
    monkeypatch.setattr(symbols, "installed_version", lambda: "")
    assert launch.main(["--policy", "p"]) == 2
    assert "install sglang" in capsys.readouterr().err


def test_a_strict_launch_checks_the_policy_first(monkeypatch, capsys):
    monkeypatch.setattr(symbols, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(symbols, "check_symbols", list)
    assert launch.main(["--policy", "nowhere", "--governor-strict"]) == 2
    assert "expected a checkpoint directory" in capsys.readouterr().err


# --- the benchmark -------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--count-context"], ["--cold"]])
def test_the_benchmark_ends_with_one_json_object(capsys, more, checkpoint):
    arguments = ["--json", "--decisions", "20", "--batch-size", "8", "--policy", str(checkpoint)]
    assert bench_decision.main([*arguments, *more]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tiers"] == ["cold", "1", "5"]
    assert report["decision"]["p99_us"] >= report["decision"]["p50_us"] > 0
    assert report["result"]["p50_us"] > 0
    assert ("cold_decision" in report) == ("--cold" in more)


def test_switch_lines_are_told_from_others():
    from engine_hooks.attach import _is_no_switch

    def record(text):
        return logging.LogRecord("x", logging.INFO, "f", 1, text, (), None)

    assert not _is_no_switch(record(f"{symbols.SWITCH_MESSAGE}: steps 1 -> 3"))
    assert _is_no_switch(record("Built adaptive runtime state"))
