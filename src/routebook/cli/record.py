"""Record files as the commands use them: trouble with a path becomes one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routebook.errors import RequestError
from routebook.routes import RouteSample, read_routes


def read_samples(path: Path) -> list[RouteSample]:
    """All samples of a `.routes` file.

    Raises:
        RequestError: the file cannot be opened.
        FormatError: it is damaged, truncated or empty.
    """
    try:
        return list(read_routes(path))
    except OSError as error:
        raise RequestError(
            f"cannot read {path}: {error.strerror}; name a file that `routebook generate --out` wrote"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses within the block into an error about `path`.

    Raises:
        RequestError: `path` could not be written.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(
            f"cannot write {path}: {error.strerror}; name a place that can be written"
        ) from error
