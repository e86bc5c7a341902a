"""A checkpoint: the trained policy and all that it takes to trust it, as one directory.

=============================  =================================================================
``policy.safetensors``         the parameters of ``controller/policy.py``, float32
``policy.json``                features, tiers, training, evaluation, and the hashes of all files
``calibration.json``           the calibration that it runs on unless it is given another
``training_state.safetensors`` optional: critic and optimizer, for resuming only
=============================  =================================================================

Both JSON files are canonical text without a clock reading, so that the same training gives the same
bytes. ``policy.json`` holds the hash of every other file and its own: loading finds any altered
byte. Nothing is ever unpickled, and serving needs no PyTorch.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from controller import __version__
from controller.calibration import Calibration
from controller.errors import CheckpointError, SpecGovernorError
from controller.features import NUM_GLOBAL, NUM_PER_TIER, feature_manifest
from controller.jsonfile import canonical_text, sha256_of, write_atomically
from controller.policy import CHECKPOINT_FIX, NumpyPolicy
from controller.tiers import COLD, NATIVE, OFF, Tier, resolve_tiers, tier_of

SCHEMA = "specgovernor.policy"
SCHEMA_VERSION = 1

POLICY_JSON = "policy.json"
PARAMETERS = "policy.safetensors"
CALIBRATION = "calibration.json"
TRAINING_STATE = "training_state.safetensors"
FILES = (POLICY_JSON, PARAMETERS, CALIBRATION, TRAINING_STATE)

_KEY_TYPES: dict[str, type] = {
    "schema": str,
    "schema_version": int,
    "code_version": str,
    "features": dict,
    "hidden_sizes": list,
    "tiers": list,
    "calibration": dict,
    "training_config": dict,
    "evaluation": dict,
    "files": dict,
    "sha256": str,
}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        policy: The network.
        tiers: Tiers in the order of its logits: those it was saved with, or was loaded for.
        calibration: Calibration that it was saved with, or was loaded for.
        training_config: Settings of the training.
        evaluation: Summary of the evaluation after the training.
        sha256: Hash that stands for the whole checkpoint, for logs.
        directory: Where it was loaded from.
    """

    policy: NumpyPolicy
    tiers: tuple[Tier, ...]
    calibration: Calibration
    training_config: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    sha256: str
    directory: Path


def save_checkpoint(
    directory: str | Path,
    *,
    parameters: Mapping[str, NDArray[Any]],
    tiers: Sequence[Tier],
    calibration: Calibration,
    training_config: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    training_state: Mapping[str, NDArray[Any]] | None = None,
    overwrite: bool = True,
) -> Checkpoint:
    """Write a checkpoint, check that it loads, and only then move it into place.

    The old checkpoint is moved aside by a rename right before the new one takes its name, and is
    put back if that fails: whoever loads meanwhile never gets a mixture of the two.

    Args:
        directory: Created, or replaced if it holds a checkpoint (also a damaged one).
        parameters: Float32 arrays, see ``controller.policy.PARAMETER_DIMENSIONS``.
        tiers: Tiers in the order of the logits.
        calibration: Calibration of the training; it must have the tiers.
        training_config: Settings as JSON values.
        evaluation: Results as JSON values.
        training_state: Arrays of any name that resuming needs.
        overwrite: Whether an existing checkpoint may be replaced.

    Returns:
        The checkpoint, as loading it gives it.

    Raises:
        CheckpointError: If an argument cannot be saved, or ``directory`` cannot be replaced.
    """
    directory = Path(directory).resolve()
    _require_replaceable(directory, overwrite)
    policy = NumpyPolicy(parameters)
    files = {
        PARAMETERS: safetensors.numpy.save(dict(policy.parameters)),
        CALIBRATION: _json_bytes("calibration", calibration.to_json()),
    }
    if training_state is not None:
        # The format stores the memory of an array as it lies, whatever its strides.
        dense = {name: np.array(value, order="C") for name, value in training_state.items()}
        try:
            files[TRAINING_STATE] = safetensors.numpy.save(dense)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"training_state: expected numeric arrays ({error})") from error
    body = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "code_version": __version__,
        "features": feature_manifest(),
        "hidden_sizes": policy.hidden_sizes,
        "tiers": [tier.name for tier in tiers],
        "calibration": {"name": calibration.name, "sha256": calibration.sha256},
        "training_config": dict(training_config),
        "evaluation": dict(evaluation),
        "files": {name: sha256_of(data) for name, data in files.items()},
    }
    own = sha256_of(_json_bytes("training_config or evaluation", body))
    files[POLICY_JSON] = _json_bytes(POLICY_JSON, {**body, "sha256": own})
    value = _policy_json(files[POLICY_JSON])
    try:
        checkpoint = _assemble(directory, value, files)
    except SpecGovernorError as error:
        raise CheckpointError(f"cannot save {directory}: {error}") from error
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        new, old = workspace / "new", workspace / "old"
        try:
            for name, data in files.items():
                write_atomically(new / name, data)
            load_checkpoint(new)  # The disk may not hold what was written.
            _swap(new, directory, old)
        finally:
            if directory.exists() or not old.exists():
                shutil.rmtree(workspace, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written ({error.strerror}); make its parent writable or "
            "choose another directory"
        ) from error
    return checkpoint


def load_checkpoint(
    directory: str | Path,
    calibration: Calibration | str | Path | None = None,
    tiers: str | Sequence[str | int] | None = None,
    off: str = "auto",
) -> Checkpoint:
    """Load a checkpoint and check all of it.

    Args:
        directory: The checkpoint.
        calibration: System to run the policy on, or its file; None takes the checkpoint's own. The
            network is shared over tiers and sees costs as ratios, so it runs on any.
        tiers: Tiers to choose from there, such as ``"off,1,3"``. None takes the checkpoint's on its
            own calibration, and on another every depth that it has, and off if it has one.
        off: What ``off`` means in ``tiers``, see :func:`controller.tiers.resolve_tiers`.

    Returns:
        The checkpoint, with the given calibration and tiers in place of its own.

    Raises:
        CheckpointError: If a file is missing, unknown or altered, or if the checkpoint was made
            for other features or another schema. The message is one line and says what to do.
        CalibrationError: If the calibration's file cannot be used.
        TierError: If the calibration lacks one of ``tiers``.
    """
    directory = Path(directory)
    try:
        loaded = _assemble(directory, *_read(directory))
    except SpecGovernorError as error:
        raise _failure(directory, error) from error
    if calibration is None and tiers is None:
        return loaded
    if calibration is None:
        calibration = loaded.calibration
    elif not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    if tiers is None:
        tiers = _all_tiers(calibration, off)
    resolved = resolve_tiers(tiers, calibration.tier_names, off)
    return replace(loaded, calibration=calibration, tiers=resolved)


def _all_tiers(calibration: Calibration, off: str) -> list[str]:
    """Return every depth of a calibration, and off if any kind that it could mean is there."""
    kinds = (COLD, NATIVE) if off == "auto" else (off,)
    depths = [name for name in calibration.tier_names if tier_of(name).num_steps]
    return [OFF] * any(kind in calibration.tier_names for kind in kinds) + depths


def load_training_state(directory: str | Path) -> dict[str, NDArray[Any]]:
    """Load the arrays that resuming a training needs.

    Raises:
        CheckpointError: If the checkpoint has none, or a file is missing, unknown or altered.
    """
    directory = Path(directory)
    try:
        _, files = _read(directory)
        if TRAINING_STATE not in files:
            raise CheckpointError(
                f"expected {TRAINING_STATE}, but the checkpoint was saved without; start a new "
                "training with `python -m training.ppo`"
            )
        return _tensors(TRAINING_STATE, files[TRAINING_STATE])
    except SpecGovernorError as error:
        raise _failure(directory, error) from error


def _assemble(directory: Path, value: Mapping[str, Any], files: Mapping[str, bytes]) -> Checkpoint:
    """Build a checkpoint from ``policy.json`` and the other files, checking what they mean."""
    difference = _first_difference(
        json.loads(canonical_text(feature_manifest())), value["features"], "features"
    )
    if difference:
        raise CheckpointError(
            f"{difference}; train again with `python -m training.ppo`, or use specgovernor "
            f"{value['code_version']}, which made this checkpoint"
        )
    policy = NumpyPolicy(_tensors(PARAMETERS, files[PARAMETERS]))
    expected = (NUM_GLOBAL, NUM_PER_TIER, value["hidden_sizes"])
    found = (policy.num_global, policy.num_per_tier, list(policy.hidden_sizes))
    if found != expected:
        raise CheckpointError(
            f"{PARAMETERS}: expected global features, tier features and hidden sizes "
            f"{expected}, got {found}"
        )
    calibration = Calibration.from_json(_json_value(CALIBRATION, files[CALIBRATION]), CALIBRATION)
    identity = {"name": calibration.name, "sha256": calibration.sha256}
    if identity != value["calibration"]:
        raise CheckpointError(f"{CALIBRATION}: expected {value['calibration']}, got {identity}")
    tiers = tuple(tier_of(name) for name in value["tiers"])
    names = [tier.name for tier in tiers]
    if not names or len(set(names)) != len(names) or set(names) - set(calibration.tier_names):
        raise CheckpointError(
            f"tiers: expected one or more different tiers of the calibration "
            f"({', '.join(calibration.tier_names)}), got {', '.join(names)}"
        )
    return Checkpoint(
        policy=policy,
        tiers=tiers,
        calibration=calibration,
        training_config=value["training_config"],
        evaluation=value["evaluation"],
        sha256=value["sha256"],
        directory=directory,
    )


def _failure(directory: Path, error: Exception) -> CheckpointError:
    """Name the checkpoint in an error, end it with the fix, and keep it on one line."""
    fix = "" if "training.ppo" in str(error) else f"; {CHECKPOINT_FIX}"
    return CheckpointError(" ".join(f"{directory}: {error}{fix}".split()))


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return ``policy.json`` and the other files' bytes, after checking every hash."""
    if not directory.is_dir():
        raise CheckpointError("expected a checkpoint directory, found none")
    value = _policy_json(_bytes(directory / POLICY_JSON))
    hashes = value["files"]
    if not {PARAMETERS, CALIBRATION} <= hashes.keys() <= set(FILES) - {POLICY_JSON}:
        raise CheckpointError(
            f"{POLICY_JSON}: expected the hashes of {PARAMETERS}, {CALIBRATION} and perhaps "
            f"{TRAINING_STATE}, got those of {', '.join(hashes)}"
        )
    files = {}
    for name, expected in hashes.items():
        files[name] = _bytes(directory / name)
        found = sha256_of(files[name])
        if found != expected:
            raise CheckpointError(f"{name}: expected sha256 {expected}, got {found}")
    for path in sorted(directory.iterdir()):
        if path.name not in (POLICY_JSON, *hashes) and not path.name.startswith("."):
            raise CheckpointError(
                f"{path.name}: expected only {', '.join((POLICY_JSON, *hashes))}; move the file "
                "elsewhere, or train again with `python -m training.ppo`"
            )
    return value, files


def _policy_json(data: bytes) -> dict[str, Any]:
    """Parse ``policy.json`` and check its schema, its text, its own hash and its types."""
    value = _json_value(POLICY_JSON, data)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise CheckpointError(f"{POLICY_JSON}: expected an object of schema {SCHEMA!r}")
    if value.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{POLICY_JSON}: expected schema_version {SCHEMA_VERSION}, got "
            f"{value.get('schema_version')!r}"
        )
    body = {key: item for key, item in value.items() if key != "sha256"}
    found = sha256_of(_json_bytes(POLICY_JSON, body))
    if value.get("sha256") != found or _json_bytes(POLICY_JSON, value) != data:
        raise CheckpointError(
            f"{POLICY_JSON}: expected an unaltered file with sha256 {value.get('sha256')}, got "
            f"other text (its content has {found})"
        )
    wrong = sorted(value.keys() ^ _KEY_TYPES.keys())
    wrong += [k for k, t in _KEY_TYPES.items() if k not in wrong and not isinstance(value[k], t)]
    if wrong:
        raise CheckpointError(
            f"{POLICY_JSON}: expected the keys {', '.join(_KEY_TYPES)} with values of their "
            f"types, got something else in {', '.join(wrong)}"
        )
    return value


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path.name}: expected a file, cannot read it ({error.strerror})"
        ) from error


def _tensors(name: str, data: bytes) -> dict[str, NDArray[Any]]:
    try:
        tensors: dict[str, NDArray[Any]] = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: expected safetensors, cannot read it ({error})") from error
    return tensors


def _json_value(name: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: expected JSON, cannot read it ({error})") from error


def _json_bytes(what: str, value: Any) -> bytes:
    try:
        return canonical_text(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: expected finite numbers, texts, lists and objects with text keys ({error})"
        ) from error


def _first_difference(expected: Any, found: Any, where: str) -> str | None:
    """Say where two JSON values differ first; names come before other keys."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys(), key=lambda key: (key != "name", key)):
            difference = _first_difference(
                expected.get(key, "nothing"), found.get(key, "nothing"), f"{where}.{key}"
            )
            if difference:
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list):
        for i in range(max(len(expected), len(found))):
            one = expected[i] if i < len(expected) else {"name": "nothing"}
            other = found[i] if i < len(found) else {"name": "nothing"}
            label = f" ({one['name']})" if isinstance(one, dict) and "name" in one else ""
            difference = _first_difference(one, other, f"{where}[{i}]{label}")
            if difference:
                return difference
        return None
    return None if expected == found else f"{where}: expected {expected!r}, got {found!r}"


def _require_replaceable(directory: Path, overwrite: bool) -> None:
    """Raise unless ``directory`` is absent, empty, or holds a checkpoint and nothing else."""
    if not os.path.lexists(directory):
        return
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else [directory.name]
    if not names:
        return
    others = sorted(set(names) - set(FILES))
    if others or not {POLICY_JSON, PARAMETERS} & set(names):
        raise CheckpointError(
            f"{directory}: expected a checkpoint to replace, found {', '.join(others or names)}; "
            "choose another directory, or move these files elsewhere"
        )
    if not overwrite:
        raise CheckpointError(
            f"{directory}: there is a checkpoint already; choose another directory or allow "
            "overwriting"
        )


def _swap(new: Path, directory: Path, old: Path) -> None:
    """Rename ``new`` to ``directory``, moving what is there to ``old`` and back on failure."""
    if directory.exists():
        directory.rename(old)
    try:
        new.rename(directory)
    except BaseException:
        if old.exists():
            old.rename(directory)
        raise
