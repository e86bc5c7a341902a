"""Canonical JSON: one text for one value, so that files can be hashed and compared."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def canonical_text(value: Any) -> str:
    """Return the one JSON text of ``value``: sorted keys, two-space indent, final newline.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def sha256_of(data: str | bytes) -> str:
    """Return the SHA-256 of a text (as UTF-8) or of bytes, in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write ``data`` beside ``path`` and move it into place, so no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
