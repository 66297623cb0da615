"""Record files as the commands take and use them: trouble with a path becomes one clear line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routebook.errors import RequestError
from routebook.routes import RouteSample, read_routes


def add_record_and_model(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the arguments of a command that runs a record's tokens through the model that made it.

    Args:
        parser: of the command.
        purpose: what the record is for, as help says it.
    """
    parser.add_argument("file", type=Path, metavar="FILE.routes", help=purpose)
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="the model that made it: a folder, a hub id, or `tiny`",
    )


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
