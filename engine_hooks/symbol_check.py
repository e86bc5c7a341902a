"""Says which names are missing from the source of a package, or take other parameters.

It reads the source and imports nothing: so it runs against versions that are not installed, sees
attributes that only exist on instances, and costs a server no import it would not make.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

Scope = ast.Module | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_package(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it; None if there is none."""
    spec = importlib.util.find_spec(name)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def missing_symbols(
    package: Path, symbols: Iterable[tuple[str, tuple[str, ...] | None]]
) -> list[str]:
    """Check names against the source of a package.

    Args:
        package: Folder of the package, named in every path.
        symbols: Dotted paths, alternatives separated by ``|``, each with the first parameters of
            the function, or None if only the name matters.

    Returns:
        One line for each path that is missing or differs, in the given order.
    """
    faults = []
    for path, parameters in symbols:
        found = [_fault(package, one, parameters) for one in path.split("|")]
        if all(found):
            faults.append(str(found[0]))
    _parse.cache_clear()
    return faults


def _fault(package: Path, path: str, parameters: tuple[str, ...] | None) -> str | None:
    """Say what is wrong with one path; None if nothing is."""
    parts = path.split(".")[1:]
    module, rest = _module(package, parts)
    if module is None:
        return f"{path} is missing"
    scope: Scope = module
    for name in rest[:-1]:
        inner = next(
            (n for n in scope.body if isinstance(n, ast.ClassDef) and n.name == name), None
        )
        if inner is None:
            return f"{path} is missing"
        scope = inner
    function = next((n for n in scope.body if isinstance(n, Function) and n.name == rest[-1]), None)
    if function is None:
        if parameters is None and rest[-1] in _assigned(scope):
            return None
        return f"{path} is missing"
    return None if parameters is None else _parameter_fault(path, function, parameters)


def _module(package: Path, parts: list[str]) -> tuple[ast.Module | None, list[str]]:
    """Return the module of a path, parsed, and what of the path is inside of it."""
    folder = package
    for index, part in enumerate(parts):
        for file in (folder / f"{part}.py", folder / part / "__init__.py"):
            inside = parts[index + 1 :]
            if file.is_file() and not (file.name == "__init__.py" and _is_module(file, inside)):
                return _parse(file), inside
        folder = folder / part
    return None, []


def _is_module(init: Path, inside: list[str]) -> bool:
    """Tell whether the next part of a path is a module of the package with this ``__init__``."""
    return bool(inside) and (
        (init.parent / f"{inside[0]}.py").is_file() or (init.parent / inside[0]).is_dir()
    )


@lru_cache(maxsize=32)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _assigned(scope: Scope) -> set[str]:
    """Return the names that a class or a module assigns, also to ``self`` in any method."""
    return set(_names(scope))


def _names(scope: Scope) -> Iterator[str]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
    for node in scope.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _parameter_fault(path: str, function: Function, expected: tuple[str, ...]) -> str | None:
    """Say how the parameters of a function differ from those that it is called with."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(names) - len(arguments.defaults)
    keyword_required = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    if tuple(names[: len(expected)]) == expected and required <= len(expected):
        if not keyword_required:
            return None
    shown = ", ".join([*names[:required], *keyword_required])
    return f"{path} takes ({shown}), expected ({', '.join(expected)})"
