"""What the operator sets: environment variables, because a plugin has no command line of its own.

=========================  =====================================================================
``SPECGOVERNOR_POLICY``    checkpoint directory; without it nothing is governed
``SPECGOVERNOR_MODE``      ``on`` (default), ``shadow``: decide and log, change nothing, or ``off``
``SPECGOVERNOR_STRICT``    ``1``: refuse to start a server that cannot be governed
``SPECGOVERNOR_TRACE``     file for the step trace, ``.jsonl`` or ``.jsonl.gz``
``SPECGOVERNOR_DECISIONS`` file for one JSON line a decode round: what was seen, asked for and run
=========================  =====================================================================
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.errors import ConfigError

POLICY = "SPECGOVERNOR_POLICY"
MODE = "SPECGOVERNOR_MODE"
STRICT = "SPECGOVERNOR_STRICT"
TRACE = "SPECGOVERNOR_TRACE"
DECISIONS = "SPECGOVERNOR_DECISIONS"

ON = "on"
SHADOW = "shadow"
OFF = "off"
MODES = (OFF, SHADOW, ON)

_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True)
class Settings:
    """The operator's settings.

    Attributes:
        policy: Checkpoint directory, or None.
        mode: ``"off"``, ``"shadow"`` or ``"on"``; ``"off"`` without a policy.
        strict: Whether a server that cannot be governed must not start.
        trace: File of the step trace, or None.
        decisions: File of the decision log, or None.
    """

    policy: Path | None = None
    mode: str = OFF
    strict: bool = False
    trace: Path | None = None
    decisions: Path | None = None

    @property
    def governs(self) -> bool:
        """Whether decisions are made at all."""
        return self.mode != OFF

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do in a server."""
        return not self.governs and self.trace is None

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
        strict = _FLAGS.get(env.get(STRICT, "").strip().lower())
        if strict is None:
            raise ConfigError(f"{STRICT}: expected 0 or 1, got {env[STRICT]!r:.40}")
        return Settings(
            policy=policy,
            mode=mode if policy is not None else OFF,
            strict=strict,
            trace=_path(env.get(TRACE, "")),
            decisions=_path(env.get(DECISIONS, "")),
        )


def _path(text: str) -> Path | None:
    return Path(text.strip()).absolute() if text.strip() else None
