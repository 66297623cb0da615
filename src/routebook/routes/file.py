"""Files of samples, ending in `.routes`: checksummed frames, one after the other, and nothing else."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from routebook.errors import ConfigError, DamagedError, FormatError, RequestError, TruncatedError
from routebook.routes.codec import check_codec
from routebook.routes.frame import (
    PREAMBLE_NBYTES,
    decode_frame,
    encode_frame,
    frame_nbytes,
    is_checksummed,
)
from routebook.routes.sample import RouteSample

SUFFIX = ".routes"


class RoutesWriter:
    """Write samples to a file that appears whole, under its name, or not at all.

    Used as a context manager. Until the block ends without an exception, the frames lie in a hidden
    file beside the target, and whatever the target held before is untouched.

    Args:
        path: where to write; ends in `.routes`.
        codec: how to write the ids, one of `CODEC_NAMES`.

    Raises:
        ConfigError: another ending, a folder that does not exist, or an unknown codec.
    """

    def __init__(self, path: str | os.PathLike[str], codec: str = "raw") -> None:
        self.path = Path(path)
        self.codec = codec
        self.num_samples = 0
        """Samples written so far."""
        check_codec(codec)
        if self.path.suffix != SUFFIX:
            raise ConfigError(f"{self.path} does not end in {SUFFIX}; name the file so")
        if not self.path.parent.is_dir():
            raise ConfigError(f"there is no folder {self.path.parent}; make it first")
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self._partial.open("xb")
        return self

    def write(self, sample: RouteSample) -> None:
        """Append one sample.

        Raises:
            RequestError: outside the `with` block.
        """
        if self._file is None:
            raise RequestError(f"{self.path} is not open; write inside `with RoutesWriter(...)`")
        self._file.write(encode_frame(sample, self.codec, checksum=True))
        self.num_samples += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None, "left without having been entered"
        file, self._file = self._file, None
        try:
            if kind is None:
                self._finish(file)
        finally:
            file.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self, file: BinaryIO) -> None:
        if not self.num_samples:
            raise RequestError(f"no sample was written, so {self.path} was not made")
        file.flush()
        # The name must not outlive a crash that the content does not.
        os.fsync(file.fileno())
        self._partial.replace(self.path)


def read_routes(path: str | os.PathLike[str]) -> Iterator[RouteSample]:
    """Read the samples of a `.routes` file one by one; one frame is in memory at a time.

    Raises (while iterating):
        FileNotFoundError: there is no such file.
        TruncatedError: the file is empty, or ends within a frame.
        DamagedError: a frame contradicts its checksum or itself.
        FormatError: something else than frames of samples, or frames of a newer version.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise TruncatedError(f"{path} is empty; it was not written by this program")
        number = at = 0
        while at < size:
            number += 1
            try:
                buffer = _read_frame(file, size - at)
                sample = _as_sample(buffer)
            except FormatError as error:
                raise type(error)(
                    f"{path}: frame {number}, at byte {at}: {error}; {_remedy(error, number)}"
                ) from error
            yield sample
            at += len(buffer)


def _read_frame(file: BinaryIO, remaining: int) -> bytes:
    """Read one frame; its length is believed only up to the end of the file."""
    head = file.read(PREAMBLE_NBYTES)
    nbytes = frame_nbytes(head)
    if nbytes > remaining:
        raise TruncatedError(f"it is {nbytes} bytes long, but the file ends after {remaining}")
    if not is_checksummed(head):
        raise FormatError("it has no checksum, which every frame of a file has")
    file.seek(-len(head), os.SEEK_CUR)
    return file.read(nbytes)


def _as_sample(buffer: bytes) -> RouteSample:
    sample = decode_frame(buffer)
    if not isinstance(sample, RouteSample):
        raise FormatError("it holds a bare record without tokens, where a sample must be")
    return sample


def _remedy(error: FormatError, number: int) -> str:
    if not isinstance(error, DamagedError | TruncatedError):
        return "write the file with RoutesWriter, or read it with the version that wrote it"
    kept = f"the {number - 1} samples before it can be read; " if number > 1 else ""
    return f"{kept}copy the file again, or generate it anew"
