"""What the operator sets: environment variables, because a plugin has no command line of its own.

============================  ==================================================================
``SPECGOVERNOR_POLICY``       checkpoint directory; without it nothing is governed
``SPECGOVERNOR_CALIBRATION``  calibration of this server, instead of the one in the checkpoint
``SPECGOVERNOR_TIERS``        tiers to choose from, such as ``off,1,3``, instead of all that it has
``SPECGOVERNOR_MODE``         ``on`` (default), ``shadow``: only decide and log, or ``off``
``SPECGOVERNOR_STRICT``       ``1``: refuse to start a server that cannot be governed
``SPECGOVERNOR_GUARD``        ``0``: let the policy decide even where another tier measures better
``SPECGOVERNOR_REPEAT``       rounds that a decision stands for with up to 4 requests; default 8
``SPECGOVERNOR_TRACE``        file for the step trace, ``.jsonl`` or ``.jsonl.gz``
``SPECGOVERNOR_DECISIONS``    file for a JSON line a decode round: what was seen, asked and run
============================  ==================================================================

The mode can be changed on a running server (``engine_hooks/mode.py``); a server with a policy is
prepared for ``on`` in every mode.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.checkpoint import Checkpoint, load_checkpoint
from controller.decision import REPEAT_ROUNDS
from controller.errors import ConfigError

POLICY = "SPECGOVERNOR_POLICY"
CALIBRATION = "SPECGOVERNOR_CALIBRATION"
TIERS = "SPECGOVERNOR_TIERS"
MODE = "SPECGOVERNOR_MODE"
STRICT = "SPECGOVERNOR_STRICT"
GUARD = "SPECGOVERNOR_GUARD"
REPEAT = "SPECGOVERNOR_REPEAT"
TRACE = "SPECGOVERNOR_TRACE"
DECISIONS = "SPECGOVERNOR_DECISIONS"

ON = "on"
SHADOW = "shadow"
OFF = "off"
MODES = (OFF, SHADOW, ON)

MAX_REPEAT = 64

_FLAGS = {
    "on": True,
    "off": False,
    "0": False,
    "false": False,
    "no": False,
    "1": True,
    "true": True,
    "yes": True,
}


@dataclass(frozen=True)
class Settings:
    """The operator's settings.

    Attributes:
        policy: Checkpoint directory, or None.
        calibration: Calibration file, or None for the checkpoint's own.
        tiers: Names of tiers, or None for the checkpoint's, or all of another calibration.
        mode: ``"off"``, ``"shadow"`` or ``"on"`` at the start; ``"off"`` without a policy.
        strict: Whether a server that cannot be governed must not start.
        guard: Whether what is measured may overrule the policy.
        repeat: Rounds that a decision stands for where there are few requests, 1 to MAX_REPEAT.
        trace: File of the step trace, or None.
        decisions: File of the decision log, or None.
    """

    policy: Path | None = None
    mode: str = OFF
    strict: bool = False
    guard: bool = True
    repeat: int = REPEAT_ROUNDS
    trace: Path | None = None
    decisions: Path | None = None
    calibration: Path | None = None
    tiers: str | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do in a server."""
        return self.policy is None and self.trace is None

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> "Settings":
        """Read the settings.

        Raises:
            ConfigError: If a value is none of those that are allowed.
        """
        env = os.environ if environment is None else environment
        policy = _path(env.get(POLICY, ""))
        mode = env.get(MODE, "").strip().lower() or ON
        if mode not in MODES:
            raise ConfigError(f"{MODE}: expected {', '.join(MODES)}, got {mode!r:.40}")
        return Settings(
            policy=policy,
            mode=mode if policy is not None else OFF,
            strict=_flag(env, STRICT, False),
            guard=_flag(env, GUARD, True),
            repeat=_rounds(env, REPEAT, REPEAT_ROUNDS),
            trace=_path(env.get(TRACE, "")),
            decisions=_path(env.get(DECISIONS, "")),
            calibration=_path(env.get(CALIBRATION, "")),
            tiers=env.get(TIERS, "").strip() or None,
        )

    def load_policy(self) -> Checkpoint:
        """Load the policy for the calibration and the tiers that are set.

        Raises:
            SpecGovernorError: If none is set, or one of these does not load or fit.
        """
        if self.policy is None:
            raise ConfigError("no policy is set")
        return load_checkpoint(self.policy, self.calibration, self.tiers)


def asks_for_strict(environment: Mapping[str, str] | None = None) -> bool:
    """Tell whether the operator wants no server without a governor; a misspelt wish is one too."""
    try:
        return _flag(os.environ if environment is None else environment, STRICT, False)
    except ConfigError:
        return True


def _flag(environment: Mapping[str, str], name: str, unset: bool) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in ("", *_FLAGS):
        raise ConfigError(f"{name}: expected 0 or 1, got {environment[name]!r:.40}")
    return _FLAGS[text] if text else unset


def _rounds(environment: Mapping[str, str], name: str, unset: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return unset
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_REPEAT):
        raise ConfigError(f"{name}: expected 1 to {MAX_REPEAT} rounds, got {text!r:.40}")
    return int(text)


def _path(text: str) -> Path | None:
    return Path(text.strip()).absolute() if text.strip() else None
