"""The exceptions that the project raises on purpose.

Every message says what was expected, what came, and what to do about it.
"""


class SpecGovernorError(ValueError):
    """Base of every error that the project raises on purpose.

    It derives from ``ValueError``, so callers that guard against bad input in general catch it.
    """


class TierError(SpecGovernorError):
    """A tier list that cannot be parsed or that its user does not support."""


class TraceError(SpecGovernorError):
    """A step trace that breaks the schema."""


class CalibrationError(SpecGovernorError):
    """A calibration that cannot be fitted, read or used for the tiers that were asked for."""


class CheckpointError(SpecGovernorError):
    """A policy checkpoint that is incomplete, altered or made for another version."""


class ConfigError(SpecGovernorError):
    """A setting that is out of range, unknown, or contradicts another one."""
