"""Python imports this at the start of every process that has its folder on PYTHONPATH.

SGLang uses its CPU kernels only where torch sees AMX tiles, and asks before it imports
`sgl_kernel`. The stand-in needs no AMX and must also run where there is none, so torch is made to
say that there is. torch is not imported for that: the answer is replaced once somebody imports
`torch.cpu`.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class TorchCpuLoader(SourceFileLoader):
    """Load `torch.cpu`, then replace one of its functions."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        super().exec_module(module)
        module._is_amx_tile_supported = lambda: True  # type: ignore[attr-defined]


class TorchCpuFinder:
    """Find `torch.cpu` where it is."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the usual spec, with the loader above."""
        spec = PathFinder.find_spec(name, path) if name == "torch.cpu" else None
        if spec is not None:
            spec.loader = TorchCpuLoader(spec.name, spec.origin)
        return spec


sys.meta_path.insert(0, TorchCpuFinder)
# SGLang does without flashinfer where there is none, and importing it, for nothing, takes seconds.
sys.modules["flashinfer"] = None  # type: ignore[assignment]
