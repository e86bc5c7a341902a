"""All baselines by name: one table, and how a user adds another.

A maker takes a :class:`training.baselines.task.Task`, tunes on it if there is something to tune,
and returns a controller. Clairvoyant references (oracle, bound) and the best fixed choice known in
hindsight are not in the table: nobody can run them.
"""

import importlib
from collections.abc import Callable

from controller.errors import ConfigError
from training.baselines.bandit import make_bandit
from training.baselines.greedy import make_greedy, make_tuned_greedy
from training.baselines.ladder import make_default_ladder, make_tuned_ladder
from training.baselines.static import make_table, make_threshold
from training.baselines.task import Task
from training.controllers import Controller

Maker = Callable[[Task], Controller]

BASELINES: dict[str, Maker] = {
    "tuned threshold": make_threshold,
    "batch table": make_table,
    "sglang ladder": make_default_ladder,
    "tuned ladder": make_tuned_ladder,
    "greedy": make_greedy,
    "tuned greedy": make_tuned_greedy,
    "bandit": make_bandit,
}
"""Tunable baselines; fixed depths and a server without speculation come from the tier list."""


def load_maker(path: str) -> Maker:
    """Return a maker of one's own, given as ``module:function``.

    Raises:
        ConfigError: If there is no such module or function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"controller {path!r}: expected MODULE:FUNCTION, such as my_rules:make")
    try:
        maker = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"controller {path!r}: {error}; give a module on PYTHONPATH and a function in it"
        ) from error
    if not callable(maker):
        raise ConfigError(f"controller {path!r}: expected a function that takes a Task")
    made: Maker = maker
    return made
