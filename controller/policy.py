"""The policy network in NumPy: from an observation to the tier of the next round.

The network is shared over tiers, so that one set of parameters serves any tier list. With the
global features ``g`` and the features ``x_k`` of tier ``k`` (order: ``controller/features.py``)::

    a       = W_global g + b_hidden         (hidden,)
    h_k     = relu(a + W_tier x_k)          (hidden,)
    z_k     = relu(W_second h_k + b_second) (second,)
    logit_k = w_logit . z_k + w_skip . x_k

Parameters are float32, the arithmetic is float64: what two kinds of CPU round differently is then
some 1e-15 of a logit, so that ranks on unlike hosts do not part over a near tie.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.errors import CheckpointError, SpecGovernorError

PARAMETER_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "global.weight": ("hidden", "num_global"),
    "tier.weight": ("hidden", "num_per_tier"),
    "hidden.bias": ("hidden",),
    "second.weight": ("second", "hidden"),
    "second.bias": ("second",),
    "logit.weight": ("second",),
    "skip.weight": ("num_per_tier",),
}
"""Every parameter with the names of its dimensions."""

CHECKPOINT_FIX = (
    "restore the checkpoint from the release or train again with `python -m training.ppo`"
)
"""What to do about a checkpoint that cannot be used; ends an error message."""


def parameter_shapes(
    num_global: int, num_per_tier: int, hidden: int, second: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter.

    Args:
        num_global: Number of global features.
        num_per_tier: Number of features of one tier.
        hidden: Width of the first hidden layer.
        second: Width of the second hidden layer.
    """
    sizes = {
        "num_global": num_global,
        "num_per_tier": num_per_tier,
        "hidden": hidden,
        "second": second,
    }
    return {
        name: tuple(sizes[dimension] for dimension in dimensions)
        for name, dimensions in PARAMETER_DIMENSIONS.items()
    }


class _Scratch:
    """Buffers of :meth:`NumpyPolicy.choose` for one number of tiers, and views into them.

    The first bias rides along as the weight of an input that is always 1, and what the global
    features add to every tier as the weight of another: that saves two additions.
    """

    def __init__(self, policy: "NumpyPolicy", num_tiers: int):
        num_global, num_per_tier = policy.num_global, policy.num_per_tier
        hidden, second = policy.hidden_sizes
        size = num_global + num_tiers * num_per_tier
        self.rounded = np.zeros(size, np.float32)
        # Packing a sequence is faster than assigning it, and rounds alike.
        self.pack_into = struct.Struct(f"{size}f").pack_into
        self.rounded_bytes = self.rounded.data.cast("B")
        self.rounded_globals = self.rounded[:num_global]
        self.rounded_tiers = self.rounded[num_global:].reshape(num_tiers, num_per_tier)
        self.with_one = np.ones(num_global + 1)
        self.globals = self.with_one[:num_global]
        self.tiers_with_one = np.ones((num_tiers, num_per_tier + 1))
        self.tiers = self.tiers_with_one[:, :num_per_tier]
        self.tiers_flat = self.tiers_with_one.reshape(-1)
        self.tier_weight = np.zeros((num_per_tier + 1, hidden))
        self.tier_weight[:-1] = policy.tier_weight
        self.shared = self.tier_weight[-1]
        self.hidden = np.zeros((num_tiers, hidden))
        self.second = np.zeros((num_tiers, second))
        self.logits = np.zeros(num_tiers)
        self.skip = np.zeros(num_tiers)


class NumpyPolicy:
    """The policy of a checkpoint, for the decision path. Not safe to share between threads.

    Attributes:
        parameters: Read-only float32 copies of the parameters, by name.
        num_global: Number of global features.
        num_per_tier: Number of features of one tier.
        hidden_sizes: Widths of the two hidden layers.
    """

    def __init__(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """Check and copy the parameters.

        Args:
            parameters: Float32 arrays by the names of ``PARAMETER_DIMENSIONS``.

        Raises:
            CheckpointError: If a name is missing or unknown, or a type, shape or value is wrong.
        """
        _check_parameters(parameters)
        second, hidden = parameters["second.weight"].shape
        self.num_global: int = parameters["global.weight"].shape[1]
        self.num_per_tier: int = parameters["tier.weight"].shape[1]
        self.hidden_sizes: tuple[int, int] = (hidden, second)
        self.parameters: dict[str, NDArray[np.float32]] = {}
        wide = {}
        for name in PARAMETER_DIMENSIONS:
            self.parameters[name] = np.array(parameters[name], np.float32, order="C")
            self.parameters[name].setflags(write=False)
            wide[name] = self.parameters[name].astype(np.float64)
        self.tier_weight = np.ascontiguousarray(wide["tier.weight"].T)
        self._global_weight = np.column_stack((wide["global.weight"], wide["hidden.bias"]))
        self._second_weight = np.ascontiguousarray(wide["second.weight"].T)
        self._second_bias = wide["second.bias"]
        self._minus_second_bias = -self._second_bias
        self._logit_weight = wide["logit.weight"]
        self._skip_weight = wide["skip.weight"]
        self._skip_with_zero = np.append(wide["skip.weight"], 0.0)
        self._zero = np.zeros(())
        self._scratch: dict[int, _Scratch] = {}

    def num_tiers(self, size: int) -> int:
        """Return the number of tiers of an observation with ``size`` entries.

        Raises:
            SpecGovernorError: If no number of tiers gives that size.
        """
        num_tiers, rest = divmod(size - self.num_global, self.num_per_tier)
        if num_tiers < 1 or rest:
            raise SpecGovernorError(
                f"expected an observation of {self.num_global} + {self.num_per_tier} * tiers "
                f"entries, got {size}; build it with controller.features of this version"
            )
        return num_tiers

    def logits(self, observation: NDArray[Any]) -> NDArray[np.float64]:
        """Return the logits of a batch of observations.

        Args:
            observation: ``(..., num_global + K * num_per_tier)``, rounded to float32.

        Returns:
            ``(..., K)``

        Raises:
            SpecGovernorError: If the last axis fits no number of tiers, or an entry is not finite.
        """
        rounded = np.asarray(observation, np.float32)
        num_tiers = self.num_tiers(rounded.shape[-1] if rounded.ndim else 1)
        if not np.isfinite(rounded).all():
            raise SpecGovernorError(_not_finite(rounded.reshape(-1, rounded.shape[-1])))
        wide = rounded.astype(np.float64)
        x = wide[..., self.num_global :].reshape(*wide.shape[:-1], num_tiers, self.num_per_tier)
        a = (
            wide[..., : self.num_global] @ self._global_weight[:, :-1].T
            + self._global_weight[:, -1]
        )
        h = np.maximum(a[..., None, :] + x @ self.tier_weight, 0.0)
        z = np.maximum(h @ self._second_weight + self._second_bias, 0.0)
        result: NDArray[np.float64] = z @ self._logit_weight + x @ self._skip_weight
        return result

    def choose(self, observation: NDArray[Any] | Sequence[float]) -> int:
        """Return the index of the tier with the highest logit; the lowest index if some tie.

        Args:
            observation: ``(num_global + K * num_per_tier,)``, an array or any sequence of numbers,
                rounded to float32.

        Raises:
            SpecGovernorError: If the length fits no number of tiers, or an entry is not finite.
        """
        size = len(observation)
        s = self._scratch.get(size)
        if s is None:
            s = _Scratch(self, self.num_tiers(size))
            self._scratch[size] = s
        try:
            s.pack_into(s.rounded_bytes, 0, *observation)
        except OverflowError:  # Beyond float32, which the assignment turns into infinity.
            with np.errstate(over="ignore"):
                s.rounded[:] = observation
        s.globals[:] = s.rounded_globals
        s.tiers[:] = s.rounded_tiers
        # Squares of float32 numbers fit float64, and so does every sum below: only an entry that
        # is not finite makes these sums so, and without one every logit is finite.
        if not math.isfinite(s.with_one.dot(s.with_one) + s.tiers_flat.dot(s.tiers_flat)):
            raise SpecGovernorError(_not_finite(s.rounded[None]))
        np.dot(self._global_weight, s.with_one, out=s.shared)
        np.dot(s.tiers_with_one, s.tier_weight, out=s.hidden)
        np.maximum(s.hidden, self._zero, out=s.hidden)
        np.dot(s.hidden, self._second_weight, out=s.second)
        # relu(z + b) is max(z, -b) + b, and b adds the same to the logit of every tier.
        np.maximum(s.second, self._minus_second_bias, out=s.second)
        np.dot(s.second, self._logit_weight, out=s.logits)
        np.dot(s.tiers_with_one, self._skip_with_zero, out=s.skip)
        np.add(s.logits, s.skip, out=s.logits)
        return int(s.logits.argmax())


def _not_finite(observations: NDArray[np.float32]) -> str:
    """Name the first entry of ``(num, size)`` observations that is not finite."""
    row, column = np.argwhere(~np.isfinite(observations))[0]
    return (
        f"expected finite observations, got {observations[row, column]} in entry {column}; look "
        "for a cost or a count that is not finite where the observation is built"
    )


def _check_parameters(parameters: Mapping[str, NDArray[Any]]) -> None:
    """Raise a CheckpointError unless names, types, shapes and values are as documented."""
    missing = sorted(PARAMETER_DIMENSIONS.keys() - parameters.keys())
    unknown = sorted(parameters.keys() - PARAMETER_DIMENSIONS.keys())
    if missing or unknown:
        raise CheckpointError(
            f"policy parameters: missing {missing}, unknown {unknown}; expected "
            f"{', '.join(PARAMETER_DIMENSIONS)}; {CHECKPOINT_FIX}"
        )
    sizes: dict[str, int] = {}
    for name, dimensions in PARAMETER_DIMENSIONS.items():
        value = parameters[name]
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise CheckpointError(
                f"parameter {name}: expected float32, got {found}; {CHECKPOINT_FIX}"
            )
        known = tuple(sizes.get(dimension) for dimension in dimensions)
        fits = value.ndim == len(known) and all(
            size >= 1 and size == (known_size or size)
            for size, known_size in zip(value.shape, known, strict=False)
        )
        if not fits:
            expected = ", ".join(
                f"{dimension}={size}" if size else dimension
                for dimension, size in zip(dimensions, known, strict=True)
            )
            raise CheckpointError(
                f"parameter {name}: expected shape ({expected}), got {value.shape}; "
                f"{CHECKPOINT_FIX}"
            )
        sizes.update(zip(dimensions, value.shape, strict=True))
        if not np.isfinite(value).all():
            raise CheckpointError(f"parameter {name}: expected finite numbers; {CHECKPOINT_FIX}")
