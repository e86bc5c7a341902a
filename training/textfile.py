"""Reading a text source line by line, plain or gzip, in constant memory.

A log can be larger than memory and can end anywhere, because its server was killed while it wrote.
"""

import gzip
import hashlib
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from controller.errors import CalibrationError

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 1 << 24
"""Longest line that is kept whole: a benchmark record with every request's details has some MB."""
PROGRESS_FROM_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 20


class TextFile:
    """The lines of one file, read once, with what was found out on the way.

    Attributes:
        path: The file.
        sha256: Hash of the (decompressed) content, once all lines were read; None before.
        truncated: Whether a gzip stream ended before its end.
        num_overlong: Lines longer than ``MAX_LINE_BYTES``, of which only the start was kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sha256: str | None = None
        self.truncated = False
        self.num_overlong = 0

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield ``(number from 1, line without its end)``; bytes that are no UTF-8 are replaced.

        A progress bar on standard error shows large files on a terminal.

        Raises:
            CalibrationError: If the file cannot be read or its gzip stream is damaged.
        """
        digest = hashlib.sha256()
        number, rest, overlong = 0, b"", False
        for chunk in self._chunks():
            digest.update(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if not overlong:
                    number += 1
                    yield number, _text(line)
                overlong = False
            if len(rest) > MAX_LINE_BYTES:
                if not overlong:
                    number += 1
                    self.num_overlong += 1
                    yield number, _text(rest[:MAX_LINE_BYTES])
                rest, overlong = b"", True
        if rest and not overlong:
            yield number + 1, _text(rest)
        self.sha256 = digest.hexdigest()

    def _chunks(self) -> Iterator[bytes]:
        try:
            size = self.path.stat().st_size
            with (
                open(self.path, "rb") as file,
                tqdm(
                    total=size,
                    unit="B",
                    unit_scale=True,
                    desc=self.path.name,
                    leave=False,
                    disable=size < PROGRESS_FROM_BYTES or not sys.stderr.isatty(),
                ) as bar,
            ):
                zipped = file.read(2) == GZIP_MAGIC
                file.seek(0)
                stream = gzip.GzipFile(fileobj=file) if zipped else file
                at = 0
                while chunk := stream.read1(_CHUNK_BYTES):
                    yield chunk
                    bar.update(file.tell() - at)
                    at = file.tell()
        except EOFError:
            self.truncated = True
        except (zlib.error, gzip.BadGzipFile) as error:
            raise CalibrationError(
                f"{self.path}: expected a gzip stream, got damaged data ({error}); copy the file "
                "again"
            ) from error
        except OSError as error:
            raise unreadable(self.path, error) from error


def read_head(path: Path) -> str:
    """Return the first megabyte of a file's text, to tell what it is.

    Raises:
        CalibrationError: If it cannot be read or holds nothing.
    """
    cut = False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            if head.startswith(GZIP_MAGIC):
                member = zlib.decompressobj(wbits=31)
                head = member.decompress(head, _HEAD_BYTES)
                cut = not member.eof
    except zlib.error as error:
        raise CalibrationError(
            f"{path}: expected a gzip stream, got damaged data ({error}); copy the file again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if cut and not head.strip():
        raise CalibrationError(
            f"{path}: expected a gzip stream, got a truncated one that ends before its first line; "
            "copy the file again"
        )
    if not head.strip():
        raise CalibrationError(
            f"{path}: expected a step trace, a server log, a benchmark output or a CSV table, got "
            "an empty file; give a file with content"
        )
    return _text(head)


def content_sha256(path: Path) -> str:
    """Return the hash of a file's content, decompressed if it is gzip."""
    file = TextFile(path)
    for _ in file.lines():
        pass
    return str(file.sha256)


def unreadable(path: Path, error: OSError) -> CalibrationError:
    """Return the error for a source that the system does not let us read."""
    return CalibrationError(
        f"{path}: cannot be read ({error.strerror or error}); give step traces, server logs, "
        "benchmark outputs or CSV tables"
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").rstrip("\r")
