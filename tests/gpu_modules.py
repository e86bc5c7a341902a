"""Loads the modules of the GPU measurements, which belong to no package."""

import importlib.util
from pathlib import Path

GPU = Path(__file__).parent / "gpu"


def load(name):
    """Return a module of ``tests/gpu``, executed anew."""
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
