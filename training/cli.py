"""How the commands of this package report bad input: one line on stderr, exit code 2."""

import argparse
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print ``error: ...`` with the way to the help, and exit with code 2."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def print_error(error: Exception) -> int:
    """Print an error as one line on stderr and return exit code 2."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2
