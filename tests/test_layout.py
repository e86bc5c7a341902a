"""The layout of the repository: import directions, what the decision path needs, ignored files."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "controller": set(),
    "env": {"controller"},
    "training": {"controller", "env"},
    "engine_hooks": {"controller"},
}
SOURCES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
HEAVY = {"torch", "sglang", "numba", "gymnasium", "stable_baselines3", "wandb", "matplotlib"}


# Only whoever wants compiled kernels imports these.
NEED_NUMBA = ("compiled", "compiled_decision")


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Return the top-level names that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = path.relative_to(ROOT).parts[0]
            names.add(own if node.level else node.module.split(".")[0])
    return names


def test_every_package_has_sources():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT).parts[0]
    forbidden = (set(MAY_IMPORT) | {"tests"}) - MAY_IMPORT[own] - {own}
    assert not imported(path) & forbidden


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_decision_path_needs_nothing_heavy(path):
    own = path.relative_to(ROOT).parts[0]
    allowed = {"sglang", "torch"} if own == "engine_hooks" else set()
    if own == "controller" and path.stem in NEED_NUMBA:
        allowed = {"numba"}
    if own in ("controller", "engine_hooks"):
        assert not imported(path) & (HEAVY - allowed)
    else:
        assert "sglang" not in imported(path)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_package_imports_under_its_own_name(package):
    code = (
        f"import sys, {package};"
        f"assert {package}.__doc__;"
        f"heavy = {HEAVY!r} & sys.modules.keys();"
        "sys.exit(f'importing it brings in {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_importing_all_of_the_controller_brings_in_nothing_heavy():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == "controller"
        and path.stem not in ("__main__", *NEED_NUMBA)
    ]
    code = (
        "import importlib, sys;"
        "[importlib.import_module(name) for name in sys.argv[1:]];"
        f"heavy = ({HEAVY!r} | {set(MAY_IMPORT) - {'controller'}!r}) & sys.modules.keys();"
        "sys.exit(f'importing them brings in {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, *modules], check=True, timeout=60, cwd=ROOT)


@pytest.fixture
def ignores(tmp_path):
    """Return a function that says which paths the repository's .gitignore hides."""
    if shutil.which("git") is None or not (ROOT / ".gitignore").exists():
        pytest.skip("needs git and the repository's .gitignore")
    git = ["git", "-c", "core.excludesFile=/dev/null", "-c", "init.templateDir="]
    subprocess.run([*git, "init", "-q", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)

    def run(paths):
        done = subprocess.run(
            [*git, "check-ignore", "--no-index", "--stdin"],
            cwd=tmp_path,
            input="\n".join(paths),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        return done.stdout.split()

    return run


def test_git_ignores_no_source(ignores):
    kept = [str(path.relative_to(ROOT)) for path in SOURCES]
    kept += [f"{package}/new_module.py" for package in (*MAY_IMPORT, "tests")]
    kept += [
        f"checkpoints/h200-llama3-8b-eagle3-fa3/{name}"
        for name in ("policy.json", "policy.safetensors")
    ]
    kept += ["training/data/traces/one.jsonl.gz", "training/data/tables/one.csv"]
    kept += ["constraints.txt", "Makefile", ".ci/run", ".gitignore", "pyproject.toml"]
    assert ignores(kept) == []


def test_git_ignores_what_commands_leave_behind(ignores):
    left = [".venv/bin/python", ".venv-3.12/bin/python", "env/__pycache__/a.pyc"]
    left += ["specgovernor.egg-info/PKG-INFO", "build/lib/a.py", "dist/a.whl"]
    left += ["runs/1/policy.json", "wandb/latest", ".hypothesis/a", ".mypy_cache/a"]
    left += [".pytest_cache/a", ".ruff_cache/a"]
    assert ignores(left) == left
