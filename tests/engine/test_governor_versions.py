"""Every symbol that is used is in the oldest, a middle and the newest SGLang that is supported.

The wheels are read, not installed: they are fetched once into the environment's cache.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine_hooks import symbols

pytestmark = pytest.mark.timeout(900)

CACHE = Path(sys.prefix) / "cache"


def source_of(version):
    """Return the folder of the `sglang` package of a version, as its wheel has it."""
    folder = CACHE / f"sglang-{version}"
    if not (folder / "whole").exists():
        command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder)
        subprocess.run([*command, f"sglang=={version}"], check=True, timeout=300)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("sglang/srt/")]
            archive.extractall(folder, [n for n in names if n.endswith(".py")])
        wheel.unlink()
        (folder / "whole").touch()
    return folder / "sglang"


@pytest.mark.parametrize("version", [symbols.FIRST_SUPPORTED, "0.5.17", symbols.LAST_SUPPORTED])
def test_all_symbols_are_there(version):
    assert symbols.check_symbols(version, source_of(version)) == []


@pytest.mark.parametrize(
    ("version", "faults"),
    [
        # The governor runs there, and its native tier as cold.
        (symbols.FIRST_SUPPORTED, ["model_runner.ModelRunner.token_to_kv_pool is missing"]),
        ("0.5.17", []),
        (symbols.LAST_SUPPORTED, []),
    ],
)
def test_native_rounds_have_their_symbols(version, faults):
    found = symbols.check_native_symbols(source_of(version))
    assert len(found) == len(faults)
    assert all(fault in line for line, fault in zip(found, faults, strict=True))


def test_a_renamed_symbol_is_found(tmp_path):
    source = source_of(symbols.LAST_SUPPORTED)
    copy = tmp_path / "sglang"
    for name in ("srt/managers/scheduler.py", "srt/managers/schedule_batch.py"):
        text = (source / name).read_text(encoding="utf-8")
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text.replace("def run_batch(", "def run_a_batch("))
    faults = symbols.check_symbols(symbols.LAST_SUPPORTED, copy)
    assert f"SGLang {symbols.LAST_SUPPORTED}: {symbols.RUN_BATCH} is missing" in faults
    assert not any(symbols.PROCESS_RESULT in fault for fault in faults)
