"""Checkpoints: what goes in comes out, nothing altered loads, nothing is lost on the way."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import controller.checkpoint as module
from controller.calibration import Calibration, PrefillCost, TierCost
from controller.checkpoint import FILES, load_checkpoint, load_training_state, save_checkpoint
from controller.errors import CalibrationError, CheckpointError, TierError
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.jsonfile import canonical_text, sha256_of
from controller.policy import parameter_shapes
from controller.tiers import tier_of


def calibration(name="bench"):
    costs = tuple(
        TierCost(tier, (1, 8), (0.005 + i * 1e-3, 0.006 + i * 1e-3), 1e-9, (0.01, 0.01), 4096, 10)
        for i, tier in enumerate(("cold", "1", "3"))
    )
    return Calibration(name, costs, PrefillCost(0.01, 1e-5), PrefillCost(0.01, 1e-5))


def arguments(seed=0, **changes):
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, 6, 4)
    return {
        "parameters": {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()},
        "tiers": [tier_of(name) for name in ("cold", "1", "3")],
        "calibration": calibration(),
        "training_config": {"seed": seed, "tiers": "off,1,3", "rates": [0.1, None]},
        "evaluation": {"goodput": 1.25},
        "training_state": {
            "critic.weight": rng.normal(size=(4, 3)).T,
            "optimizer.step": np.array(7, np.int64),
        },
        **changes,
    }


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path / "policy", **arguments())
    return tmp_path / "policy"


def assert_refused(directory, *words, call=load_checkpoint):
    with pytest.raises(CheckpointError) as caught:
        call(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    assert "python -m training.ppo" in message
    for word in words:
        assert word in message
    return message


def rewrite(directory, change):
    """Change ``policy.json`` and give it the hash of its new content."""
    value = json.loads((directory / "policy.json").read_text())
    change(value)
    del value["sha256"]
    value["sha256"] = sha256_of(canonical_text(value))
    (directory / "policy.json").write_text(canonical_text(value))


def replace_file(directory, name, data):
    """Replace a file and its hash in ``policy.json``."""
    (directory / name).write_bytes(data)
    rewrite(directory, lambda value: value["files"].update({name: sha256_of(data)}))


def test_round_trip(saved):
    given_in = arguments()
    loaded = load_checkpoint(saved)
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    for name, value in given_in["parameters"].items():
        assert loaded.policy.parameters[name].tolist() == value.tolist()
    assert [tier.name for tier in loaded.tiers] == ["cold", "1", "3"]
    assert loaded.calibration == given_in["calibration"]
    assert loaded.training_config == given_in["training_config"]
    assert loaded.evaluation == given_in["evaluation"]
    assert loaded.directory == saved
    state = load_training_state(saved)
    assert state.keys() == given_in["training_state"].keys()
    for name, value in given_in["training_state"].items():
        assert state[name].dtype == value.dtype
        assert state[name].shape == value.shape
        assert state[name].tolist() == value.tolist()


def other_system():
    """A system with a native off and depths that the saved policy never had."""
    costs = tuple(
        TierCost(tier, (1, 8), (0.02 + i * 1e-3, 0.03), 0.0, (0.0, 0.0), 4096, 10)
        for i, tier in enumerate(("2", "native", "5", "3", "7"))
    )
    return Calibration("other", costs, PrefillCost(0.01, 1e-5), PrefillCost(0.01, 1e-5))


def test_a_policy_runs_on_another_calibration(saved, tmp_path):
    other_system().save(tmp_path / "mine.json")
    own = load_checkpoint(saved)
    for given_as in (other_system(), tmp_path / "mine.json", str(tmp_path / "mine.json")):
        loaded = load_checkpoint(saved, calibration=given_as)
        assert loaded.calibration == other_system()
        assert [tier.name for tier in loaded.tiers] == ["native", "2", "3", "5", "7"]
        assert loaded.sha256 == own.sha256
        size = NUM_GLOBAL + 5 * NUM_PER_TIER
        assert loaded.policy.num_tiers(size) == len(loaded.tiers)
    chosen = load_checkpoint(saved, calibration=other_system(), tiers="off,3")
    assert [tier.name for tier in chosen.tiers] == ["native", "3"]
    assert [tier.name for tier in load_checkpoint(saved, tiers="off,3").tiers] == ["cold", "3"]
    depths = load_checkpoint(saved, calibration=other_system(), off="warm").tiers
    assert [tier.name for tier in depths] == ["2", "3", "5", "7"]


def test_a_calibration_that_does_not_fit_is_refused(saved, tmp_path):
    with pytest.raises(TierError, match="not in the calibration"):
        load_checkpoint(saved, calibration=other_system(), tiers="off,1")
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(CalibrationError, match="make one with"):
        load_checkpoint(saved, calibration=tmp_path / "mine.json")


def test_save_returns_what_load_gives(tmp_path):
    returned = save_checkpoint(tmp_path / "policy", **arguments())
    loaded = load_checkpoint(tmp_path / "policy")
    assert (returned.sha256, returned.tiers) == (loaded.sha256, loaded.tiers)
    assert (returned.calibration, returned.directory) == (loaded.calibration, loaded.directory)


def test_the_same_content_gives_the_same_bytes(saved, tmp_path):
    save_checkpoint(tmp_path / "again", **arguments())
    save_checkpoint(tmp_path / "other", **arguments(seed=1))
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()
    hashes = {load_checkpoint(tmp_path / name).sha256 for name in ("policy", "again", "other")}
    assert len(hashes) == 2


def test_training_state_is_optional(tmp_path):
    save_checkpoint(tmp_path / "policy", **arguments(training_state=None))
    load_checkpoint(tmp_path / "policy")
    assert_refused(tmp_path / "policy", "saved without", call=load_training_state)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("call", [load_checkpoint, load_training_state])
def test_a_deleted_file_is_named_with_the_fix(saved, name, call):
    (saved / name).unlink()
    assert_refused(saved, name, "restore the checkpoint from the release", call=call)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_named(saved, name):
    (saved / name).unlink()
    (saved / name).mkdir()
    assert_refused(saved, name, "cannot read it")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_no_flipped_byte_loads(saved, name, mask):
    data = (saved / name).read_bytes()
    positions = {*range(0, len(data), max(1, len(data) // 150)), *range(24), len(data) - 1}
    for position in sorted(positions):
        flipped = bytearray(data)
        flipped[position] ^= mask
        (saved / name).write_bytes(flipped)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(saved)
        assert "\n" not in str(caught.value)
    (saved / name).write_bytes(data)
    load_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data + b"\0",
        lambda data: b"[" * 100_000,
        lambda data: b"9" * 10_000,
        lambda data: b"null",
        lambda data: b'{"a": NaN}',
        lambda data: pickle.dumps({}),
        lambda data: data.replace(b"\n", b"\r\n") + b"\r\n",
        lambda data: b"\xff\xff\xff\xff\xff\xff\xff\x7f" + data,
    ],
)
def test_no_damaged_file_loads(saved, name, damage):
    (saved / name).write_bytes(damage((saved / name).read_bytes()))
    assert_refused(saved, name)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_edit_of_any_file_is_found(saved, data):
    name = data.draw(st.sampled_from(FILES))
    original = (saved / name).read_bytes()
    start = data.draw(st.integers(0, len(original)))
    length = data.draw(st.integers(0, 8))
    edited = original[:start] + data.draw(st.binary(max_size=8)) + original[start + length :]
    try:
        (saved / name).write_bytes(edited)
        if edited == original:
            load_checkpoint(saved)
        else:
            assert_refused(saved)
    finally:
        (saved / name).write_bytes(original)


def test_a_missing_directory(tmp_path):
    assert_refused(tmp_path / "none", "found none")
    (tmp_path / "file").write_text("text")
    assert_refused(tmp_path / "file", "found none")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "policy.json")


def test_an_unknown_file_is_named_but_hidden_ones_are_not_looked_at(saved):
    (saved / ".keep").write_text("")
    load_checkpoint(saved)
    (saved / "notes.txt").write_text("")
    assert_refused(saved, "notes.txt", "elsewhere")


def test_a_training_state_that_is_not_listed_is_refused(saved):
    rewrite(saved, lambda value: value["files"].pop("training_state.safetensors"))
    assert_refused(saved, "training_state.safetensors: expected only")


def drop_feature(value):
    del value["features"]["tier"][3]


def add_feature(value):
    value["features"]["global"].append({"name": "later"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(schema="other"), ["specgovernor.policy"]),
        (lambda v: v.update(schema_version=2), ["expected schema_version 1, got 2"]),
        (drop_feature, ["features.tier[3] (cost).name: expected 'cost', got 'gain_fast'"]),
        (add_feature, [f"features.global[{NUM_GLOBAL}]", "expected 'nothing', got 'later'"]),
        (
            lambda v: v["features"]["tier"][3].update(high=4),
            ["features.tier[3] (cost).high: expected 3, got 4", "specgovernor 0.1.0"],
        ),
        (lambda v: v.update(hidden_sizes=[6, 5]), ["hidden sizes", "[6, 5]", "[6, 4]"]),
        (lambda v: v.update(tiers=["cold", "9"]), ["unknown tier '9'"]),
        (lambda v: v.update(tiers=["off"]), ["unknown tier 'off'"]),
        (lambda v: v.update(tiers=["cold", "5"]), ["(cold, 1, 3)", "got cold, 5"]),
        (lambda v: v.update(tiers=["1", "1"]), ["got 1, 1"]),
        (lambda v: v.update(tiers=[]), ["tiers: expected one or more"]),
        (lambda v: v.update(tiers=[None, {}]), ["unknown tier 'None'"]),
        (lambda v: v.update(tiers="cold"), ["something else in tiers"]),
        (lambda v: v.update(files=[]), ["something else in files"]),
        (lambda v: v.update(extra=1), ["something else in extra"]),
        (lambda v: v.pop("evaluation"), ["something else in evaluation"]),
        (lambda v: v["files"].pop("calibration.json"), ["expected the hashes of"]),
        (lambda v: v["files"].update({"../x": "0"}), ["expected the hashes of"]),
        (lambda v: v["files"].update({"policy.json": "0"}), ["expected the hashes of"]),
        (lambda v: v["files"].update({"calibration.json": 5}), ["expected sha256 5"]),
        (lambda v: v["calibration"].update(name="x"), ["calibration.json: expected", "'x'"]),
        (lambda v: v["calibration"].update(sha256="0"), ["calibration.json: expected"]),
    ],
)
def test_a_well_hashed_policy_json_that_does_not_fit(saved, change, words):
    rewrite(saved, change)
    assert_refused(saved, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("skip.weight"), ["missing ['skip.weight']"]),
        (lambda p: p.update(more=np.zeros(1)), ["unknown ['more']"]),
        (lambda p: p.update({"logit.weight": np.zeros(4)}), ["logit.weight", "float64"]),
        (lambda p: p["logit.weight"].fill(np.inf), ["logit.weight", "finite"]),
        (lambda p: p.update({"logit.weight": np.zeros(5, np.float32)}), ["shape", "second=4"]),
        (
            lambda p: p.update({"global.weight": np.zeros((6, 2), np.float32)}),
            ["policy.safetensors", "expected global features", f"got (2, {NUM_PER_TIER}"],
        ),
    ],
)
def test_well_hashed_parameters_that_do_not_fit(saved, change, words):
    parameters = arguments()["parameters"]
    change(parameters)
    replace_file(saved, "policy.safetensors", safetensors.numpy.save(parameters))
    assert_refused(saved, *words)


def test_well_hashed_garbage_is_refused(saved):
    replace_file(saved, "policy.safetensors", b"garbage that is no tensor")
    assert_refused(saved, "policy.safetensors: expected safetensors")
    save_checkpoint(saved, **arguments())
    replace_file(saved, "calibration.json", b"{}")
    assert_refused(saved, "calibration.json: expected schema")
    save_checkpoint(saved, **arguments())
    replace_file(saved, "training_state.safetensors", b"garbage that is no tensor")
    assert_refused(saved, "training_state.safetensors", call=load_training_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": [tier_of(5)]}, r"tiers: expected .*got 5"),
        ({"tiers": []}, "tiers: expected one or more"),
        ({"training_config": {"rate": float("nan")}}, "training_config or evaluation"),
        ({"evaluation": {"array": np.zeros(2)}}, "training_config or evaluation"),
        ({"training_state": {"text": np.array(["a"])}}, "training_state"),
        ({"training_state": {"object": np.array([None])}}, "training_state"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_checkpoint(saved, changes, message):
    before = load_checkpoint(saved).sha256
    with pytest.raises(CheckpointError, match=message) as caught:
        save_checkpoint(saved, **arguments(**changes))
    assert "\n" not in str(caught.value)
    assert load_checkpoint(saved).sha256 == before
    assert list(saved.parent.iterdir()) == [saved]


def test_parameters_for_other_features_are_not_saved(tmp_path):
    shapes = parameter_shapes(2, 3, 4, 5)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError, match="expected global features"):
        save_checkpoint(tmp_path / "policy", **arguments(parameters=parameters))
    assert list(tmp_path.iterdir()) == []


def test_saving_replaces_the_whole_checkpoint(saved):
    save_checkpoint(saved, **arguments(seed=1, training_state=None))
    assert load_checkpoint(saved).training_config["seed"] == 1
    assert not (saved / "training_state.safetensors").exists()
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_can_be_replaced(saved, name):
    (saved / name).unlink()
    save_checkpoint(saved, **arguments())
    load_checkpoint(saved)


def test_an_empty_directory_is_used_and_parents_are_made(tmp_path):
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", **arguments())
    load_checkpoint(tmp_path / "empty")
    save_checkpoint(tmp_path / "a" / "b" / "policy", **arguments())
    load_checkpoint(tmp_path / "a" / "b" / "policy")


def test_overwriting_can_be_forbidden(saved):
    before = load_checkpoint(saved).sha256
    with pytest.raises(CheckpointError, match="there is a checkpoint already"):
        save_checkpoint(saved, **arguments(seed=1, overwrite=False))
    assert load_checkpoint(saved).sha256 == before


@pytest.mark.parametrize("names", [["thesis.txt"], ["policy.json", "thesis.txt"], ["a.json", ".x"]])
def test_a_directory_that_is_no_checkpoint_is_never_replaced(tmp_path, names):
    home = tmp_path / "home"
    home.mkdir()
    for name in names:
        (home / name).write_text("kept")
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace"):
        save_checkpoint(home, **arguments())
    assert sorted(path.name for path in home.iterdir()) == sorted(names)


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace"):
        save_checkpoint(tmp_path / "file", **arguments())
    assert (tmp_path / "file").read_text() == "kept"


def test_a_link_is_followed(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved)
    save_checkpoint(link, **arguments(seed=1))
    assert link.is_symlink()
    assert load_checkpoint(saved).training_config["seed"] == 1


@pytest.mark.parametrize("failing", ["write", "swap"])
def test_a_failure_on_the_way_keeps_the_old_checkpoint(saved, monkeypatch, failing):
    before = load_checkpoint(saved).sha256
    rename = Path.rename

    def broken_write(path, data):
        path.parent.mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    def broken_rename(self, target):
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    if failing == "write":
        monkeypatch.setattr(module, "write_atomically", broken_write)
    else:
        monkeypatch.setattr(Path, "rename", broken_rename)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(saved, **arguments(seed=1))
    assert load_checkpoint(saved).sha256 == before
    assert list(saved.parent.iterdir()) == [saved]


def test_loading_needs_no_pytorch(saved):
    code = (
        "import sys; from controller.checkpoint import load_checkpoint as load;"
        "load(sys.argv[1]); heavy = {'torch', 'numba', 'gymnasium', 'sglang', 'env', 'training'};"
        "sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(saved)], check=True, timeout=60)
