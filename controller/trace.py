"""Step traces on disk: JSON Lines, plain or gzip, one header and one object a batch result.

A server can be killed at any time, so a last line that is only partly there is left out with a
:class:`TraceWarning`. Everything else that breaks the schema is a :class:`TraceError` that names
the file, the line, the field and the fix.

Example:
    >>> import tempfile, pathlib
    >>> header = TraceHeader("0.5.17", "NVIDIA H200", "Llama-3-8B", "fa3", speculative=False)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "native.jsonl.gz"
    >>> write_trace(path, header, [TraceRow("decode", None, 4, 132, step_s=0.005)])
    >>> read_trace(path).rows[0].step_s
    0.005
"""

import gzip
import io
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from controller.errors import TraceError
from controller.jsonfile import write_atomically
from controller.trace_schema import (
    ROW_FIELDS,
    SCHEMA,
    SCHEMA_VERSION,
    TraceHeader,
    TraceRow,
)

__all__ = [
    "ROW_FIELDS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TraceReader",
    "TraceRow",
    "TraceWarning",
    "TraceWriter",
    "parse_line",
    "read_lines",
    "read_trace",
    "write_trace",
]

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 16


class TraceWarning(UserWarning):
    """A trace ends in the middle of a line, which was left out."""


@dataclass(frozen=True)
class Trace:
    """A whole trace in memory.

    Attributes:
        header: The recorded system.
        rows: Every batch result, in order.
        path: Where it was read from.
    """

    header: TraceHeader
    rows: tuple[TraceRow, ...]
    path: Path


class TraceReader:
    """Rows of a trace one by one, for traces that should not be held in memory.

    Attributes:
        path: The file.
        header: Its header, read on construction.
    """

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` and read the header.

        Raises:
            TraceError: If the file cannot be read, is empty, or has no header of this version.
        """
        self.path = Path(path)
        self._lines = read_lines(self.path)
        number, line = next(self._lines, (0, b""))
        if not number:
            raise TraceError(
                f"{self.path}: expected a header and rows, got no whole line; record again"
            )
        try:
            self.header = TraceHeader.from_json(parse_line(line))
        except TraceError as error:
            raise TraceError(f"{self.path}:{number}: {error}") from error

    def __iter__(self) -> Iterator[TraceRow]:
        """Yield the rows that are left, each checked against the schema and the header.

        Raises:
            TraceError: On the first row that breaks the schema.
        """
        for number, line in self._lines:
            try:
                row = TraceRow.from_json(parse_line(line))
                row.check_against(self.header)
            except TraceError as error:
                raise TraceError(f"{self.path}:{number}: {error}") from error
            yield row


def read_trace(path: str | Path) -> Trace:
    """Read and check a whole trace.

    Args:
        path: JSON Lines, plain or gzip (told apart by content).

    Raises:
        TraceError: If the file cannot be read or a line breaks the schema.
    """
    reader = TraceReader(path)
    return Trace(header=reader.header, rows=tuple(reader), path=reader.path)


class TraceWriter:
    """Writes a trace row by row; gzip if the name ends in ``.gz``.

    The same rows give the same bytes: the gzip header has no time and no name.
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        """Create ``path`` and write the header.

        Raises:
            OSError: If the file cannot be created.
        """
        self.path = Path(path)
        self.header = header
        self._file: IO[bytes] = open(self.path, "wb")
        self._stream = _compressor(self._file) if self.path.suffix == ".gz" else self._file
        self._stream.write(_line(header.to_json()))

    def write(self, row: TraceRow) -> None:
        """Append a row.

        Raises:
            TraceError: If the row contradicts the header.
        """
        row.check_against(self.header)
        self._stream.write(_line(row.to_json()))

    def flush(self) -> None:
        """Hand everything so far to the operating system."""
        self._stream.flush()
        self._file.flush()

    def close(self) -> None:
        """Finish the file; further calls do nothing."""
        self._stream.close()
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def write_trace(path: str | Path, header: TraceHeader, rows: Iterable[TraceRow]) -> None:
    """Write a whole trace at once; on failure ``path`` is left as it was.

    Raises:
        TraceError: If a row contradicts the header.
    """
    path = Path(path)
    buffer = io.BytesIO()
    stream: IO[bytes] = _compressor(buffer) if path.suffix == ".gz" else buffer
    stream.write(_line(header.to_json()))
    for row in rows:
        row.check_against(header)
        stream.write(_line(row.to_json()))
    if stream is not buffer:
        stream.close()
    write_atomically(path, buffer.getvalue())


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a plain or gzip file as ``(number from 1, bytes without newline)``.

    A last line that has no newline and is no JSON, or that a cut gzip stream ends in, is left out
    with a :class:`TraceWarning`.

    Raises:
        TraceError: If the file cannot be read or its gzip stream is damaged.
    """
    number, rest, complete = 0, b"", True
    for data, may_end_here in _chunks(path):
        complete = may_end_here
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            yield number, line
    if rest and _is_json(rest):
        yield number + 1, rest
    elif rest and number == 0 and complete:
        yield 1, rest  # not a cut trace but something else: the header check says what
    elif rest or not complete:
        warnings.warn(
            f"{path}:{number + 1}: the file ends in the middle of a line, which is left out",
            TraceWarning,
            stacklevel=2,
        )


def parse_line(line: bytes) -> Any:
    """Parse one line of strict JSON: UTF-8, no NaN or Infinity, no key twice.

    Raises:
        TraceError: If it is anything else.
    """
    try:
        return json.loads(
            line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise TraceError(
            f"expected a JSON object, got something else ({reason}); remove the line or record "
            "again"
        ) from error


def _chunks(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield ``(bytes, whether the file may end here)``, decompressed if needed."""
    try:
        with open(path, "rb") as file:
            data = file.read(_CHUNK_BYTES)
            if not data.startswith(_GZIP_MAGIC):
                while data:
                    yield data, True
                    data = file.read(_CHUNK_BYTES)
                return
            member = zlib.decompressobj(wbits=31)
            while data:
                yield member.decompress(data), member.eof
                data = member.unused_data.lstrip(b"\0") if member.eof else b""
                if member.eof:
                    data = data or file.read(_CHUNK_BYTES).lstrip(b"\0")
                    member = zlib.decompressobj(wbits=31) if data else member
                else:
                    data = file.read(_CHUNK_BYTES)
    except OSError as error:
        raise TraceError(
            f"{path}: expected a trace file, got an error ({error.strerror}); check the path"
        ) from error
    except zlib.error as error:
        raise TraceError(
            f"{path}: expected a gzip stream, got damaged data ({error}); copy the file again"
        ) from error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(text: str) -> NoReturn:
    raise TraceError(f"expected finite numbers, got {text}; write null for an unknown value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"field {double!r}: expected once, got it twice; remove one")
    return value


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _compressor(file: IO[bytes]) -> Any:
    return gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0)
