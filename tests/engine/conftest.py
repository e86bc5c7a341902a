"""These tests run the real SGLang engine, in an environment of its own: `make test-engine`."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
HOW = "needs SGLang, in an environment of its own: run `make test-engine`"

if HAS_SGLANG:
    # The tests import the harness, the stand-in for sgl_kernel and the training of the tiny pair.
    sys.path[:0] = [str(HERE), str(HERE / "cpu_kernels"), str(HERE / "tiny")]


class SkippedModule(pytest.Module):
    """A file that is not even imported; the summary folds all of them into one line."""

    def collect(self):
        pytest.skip(HOW, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip the files of this folder where SGLang is missing."""
    if not HAS_SGLANG:
        return SkippedModule.from_parent(parent, path=module_path)
    return None
