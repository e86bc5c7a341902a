"""How the commands of this package report bad input: one line on stderr, exit code 2."""

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from controller.errors import ConfigError
from controller.trace import TraceWarning


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print ``error: ...`` with the way to the help, and exit with code 2."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def check_output(
    output: Path, inputs: Iterable[Path | None], schema: Callable[[Any], bool]
) -> None:
    """Refuse, before any work is done, an output that would destroy something or cannot be written.

    Args:
        output: File to write.
        inputs: Files that the command reads.
        schema: Tells whether the JSON of an existing file is an earlier output.

    Raises:
        ConfigError: Saying what is in the way.
    """
    if not output.name or output.is_dir():
        raise ConfigError(f"output {str(output)!r} is a folder or nothing: give a file")
    if (output.resolve().parent / "policy.json").exists():
        raise ConfigError(f"output {output}: inside a checkpoint; give a file outside of it")
    check_apart(output, inputs, f"output {output}")
    if output.exists():
        try:
            known = schema(json.loads(output.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            known = False
        if not known:
            raise ConfigError(f"output {output} exists and is something else; give another file")


def check_apart(output: Path, others: Iterable[Path | None], what: str) -> None:
    """Refuse an output that is one of the command's other files, by whatever name or link.

    Args:
        output: File to write.
        others: Files that the command reads or writes otherwise.
        what: The output, as the message names it.

    Raises:
        ConfigError: Naming both.
    """
    for path in others:
        if path is None:
            continue
        same = path.resolve() == output.resolve()
        if same or (path.exists() and output.exists() and path.samefile(output)):
            raise ConfigError(f"{what} is also {path}, which it would replace; give another file")


def print_error(error: Exception) -> int:
    """Print an error as one line on stderr and return exit code 2."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def print_warning(text: str) -> None:
    """Print a warning as one line on stderr."""
    print("warning: " + " ".join(text.split()), file=sys.stderr)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print the warnings of reading a trace as one line each, without Python's source line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TraceWarning)
        before = warnings.showwarning

        def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if issubclass(category, TraceWarning):
                print_warning(str(message))
            else:
                before(message, category, *rest, **more)

        warnings.showwarning = show
        yield
