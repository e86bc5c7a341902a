"""Choosing by name: one table of makers, and errors that list the choices."""

import inspect
from ast import literal_eval
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from controller.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Makers by name. Their keyword arguments are the settings that a user may give.

    Args:
        what: What is made, for error messages.

    >>> sizes: Registry[int] = Registry("size")
    >>> @sizes.register("double")
    ... def double(of: int = 1) -> int:
    ...     '''Twice a number.'''
    ...     return 2 * of
    >>> sizes.make("double", of=4), sizes.parse("double:of=5")
    (8, 10)
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._makers: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Add a maker under a name; use as a decorator."""

        def add(maker: Callable[..., T]) -> Callable[..., T]:
            if name in self._makers:
                raise ConfigError(f"{self._what} {name!r} is there already; take another name")
            self._makers[name] = maker
            return maker

        return add

    def names(self) -> list[str]:
        """Return all names, in the order in which they were added."""
        return list(self._makers)

    def describe(self, name: str) -> str:
        """Return the first line of a maker's documentation."""
        return (inspect.getdoc(self._maker(name)) or "").split("\n")[0]

    def settings(self, name: str) -> list[str]:
        """Return the settings that a maker takes."""
        return list(inspect.signature(self._maker(name)).parameters)

    def _maker(self, name: str) -> Callable[..., T]:
        if name not in self._makers:
            raise ConfigError(f"{self._what} {name!r}: expected one of {', '.join(self._makers)}")
        return self._makers[name]

    def make(self, name: str, **settings: Any) -> T:
        """Make what has this name.

        Raises:
            ConfigError: If the name or a setting is unknown, or a value is not possible.
        """
        maker = self._maker(name)
        try:
            inspect.signature(maker).bind(**settings)
        except TypeError as error:
            raise ConfigError(
                f"{self._what} {name!r}: {error}; its settings are {inspect.signature(maker)}"
            ) from error
        try:
            return maker(**settings)
        except TypeError as error:
            raise ConfigError(
                f"{self._what} {name!r} with {settings}: expected the types in "
                f"{inspect.signature(maker)}, got {error}"
            ) from error

    def parse(self, text: str) -> T:
        """Make what ``name`` or ``name:setting=value,setting=value`` says.

        Values are Python literals where they can be read as one, otherwise text.
        """
        name, _, rest = text.partition(":")
        settings = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(
                    f"{self._what} {text!r}: expected name:setting=value,..., got {part!r}"
                )
            try:
                settings[key.strip()] = literal_eval(value.strip())
            except (ValueError, SyntaxError):
                settings[key.strip()] = value.strip()
        return self.make(name.strip(), **settings)
