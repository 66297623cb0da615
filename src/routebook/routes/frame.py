"""The binary frame: one record, or one sample, that describes itself.

Layout, all numbers little-endian::

    offset  bytes  what
         0      4  magic 8F 52 42 4B
         4      1  version of the layout, now 1
         5      1  flags: bit 0 = there is a checksum
         6      4  length of the header
        10      8  length of the payload
        18      4  checksum: CRC-32 of all other bytes of the frame (with 1 in place of 0), or 0
        22      h  header: a msgpack map, see FrameHeader
                   zero bytes up to a multiple of 16
                p  payload: the sections that the header lists, one after the other

Sections: `token_hashes` (uint32 per row), `token_ids` (int32 per token, in samples only), `ids` (as
the codec writes them), `valid` (one bit per row, lowest bit first; left out when every row is valid).

How the format may change, so that old and new programs keep reading each other's frames:

1. A new header field gets a default that means what frames without it mean. Fields are never renamed,
   never change type or meaning, and a name that was dropped is not used again.
2. A reader ignores header fields that it does not know, and skips sections that it does not know.
3. What a reader must not ignore raises the version. A reader refuses a version above its own, and
   keeps reading all versions below.
4. A new codec needs no new version: a reader that lacks it refuses the frame by the codec's name.
5. A flag bit or an origin of rows that the reader does not know is refused.

A frame with a checksum that was cut, or damaged in one byte, never decodes. A frame without one may
decode to something else after damage, but decoding raises nothing but FormatError, and allocates
nothing that the frame's own length does not justify.

Legend of shape suffixes: T = rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from routebook.errors import DamagedError, FormatError, RecordError, TruncatedError
from routebook.routes.codec import decode_ids, encode_ids
from routebook.routes.provenance import Origin, Provenance
from routebook.routes.record import Mask, RoutedExperts
from routebook.routes.sample import RouteSample
from routebook.routes.schema import RouteSchema

MAGIC = b"\x8fRBK"
VERSION = 1
PREAMBLE_NBYTES = 22

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Count = Annotated[int, msgspec.Meta(ge=0)]

_PREAMBLE = struct.Struct("<4sBBIQI")
_CHECKSUM_AT = PREAMBLE_NBYTES - 4
_CHECKSUMMED = 1
_ALIGNMENT = 16


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the payload."""

    name: str
    nbytes: Count


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the payload means. Fields without a default are in every frame of version 1."""

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    num_hidden_layers: int
    num_rows: Count
    sections: tuple[Section, ...]
    """In the order of the payload."""

    start: int = 0
    prefix_hash: int = 0
    codec: str = "raw"
    provenance: tuple[tuple[int, int, int, int], ...] = ()
    """`(start, stop, weight_version, origin)` of each range of rows."""

    num_prompt_tokens: int = 0
    """0 in the frame of a bare record."""

    meta: dict[str, str] = {}


_ORIGINS = frozenset(Origin) - {Origin.ABSENT}
_HEADER_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(FrameHeader)


def encode_frame(
    source: RouteSample | RoutedExperts, codec: str = "raw", checksum: bool = False
) -> bytes:
    """Write a sample or a bare record as one frame.

    Args:
        source: what to write.
        codec: how to write the ids, one of `CODEC_NAMES`. With `raw` every byte is copied once.
        checksum: protect the frame with a CRC-32; costs one more pass over it.

    Raises:
        ConfigError: no such codec.
    """
    described, sections = describe_frame(source, codec)
    header = _HEADER_ENCODER.encode(described)
    filling = bytes(_filling(len(header)))
    parts: list[bytes | memoryview] = [
        header,
        filling,
        *(section.data for section in sections.values()),
    ]
    payload_nbytes = sum(section.nbytes for section in sections.values())
    preamble = _PREAMBLE.pack(
        MAGIC, VERSION, _CHECKSUMMED if checksum else 0, len(header), payload_nbytes, 0
    )[:_CHECKSUM_AT]
    value = _checksum([preamble, *parts]) if checksum else 0
    return b"".join([preamble, struct.pack("<I", value), *parts])


def decode_frame(buffer: Buffer) -> RouteSample | RoutedExperts:
    """Read the one frame that fills `buffer`.

    Args:
        buffer: exactly one frame. Ids written with `raw` become a read-only view of it, so a
            buffer that can be written to must not be as long as the record is in use.

    Returns:
        A sample if the frame holds one, else the bare record.

    Raises:
        TruncatedError: the buffer ends before the frame does.
        DamagedError: the frame contradicts its checksum or itself.
        FormatError: this is no frame, or one that only a newer version can read.
    """
    data = np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8)
    nbytes, header_nbytes, checksummed, value = _read_preamble(data.data)
    if len(data) < nbytes:
        raise TruncatedError(f"the frame is {nbytes} bytes long, but the data ends at {len(data)}")
    if len(data) > nbytes:
        raise DamagedError(f"{len(data) - nbytes} bytes follow the frame of {nbytes} bytes")
    if checksummed and value != _checksum([data[:_CHECKSUM_AT].data, data[PREAMBLE_NBYTES:].data]):
        raise DamagedError("the frame does not match its checksum: its bytes were changed")
    payload_at = PREAMBLE_NBYTES + header_nbytes + _filling(header_nbytes)
    header = _read_header(data[PREAMBLE_NBYTES:payload_at], header_nbytes)
    return build_frame(header, data[payload_at:])


def describe_frame(
    source: RouteSample | RoutedExperts, codec: str = "raw"
) -> tuple[FrameHeader, dict[str, Bytes]]:
    """Header and sections of a frame, for forms that carry them in another envelope.

    Raises:
        ConfigError: no such codec.
    """
    record = source.record if isinstance(source, RouteSample) else source
    sections = _sections_of(source, record, codec)
    return _header_of(source, record, codec, sections), sections


def build_frame(header: FrameHeader, payload: Bytes) -> RouteSample | RoutedExperts:
    """Invert :func:`describe_frame`; the payload is the sections, one after the other.

    Raises:
        DamagedError: header and payload contradict each other or themselves.
        FormatError: something that only a newer version can read.
    """
    sections = _split_payload(header, payload)
    try:
        return _build(header, sections)
    except RecordError as error:
        raise DamagedError(f"the frame contradicts itself: {error}") from error


def frame_nbytes(head: Buffer) -> int:
    """Length of a frame in bytes, from its first `PREAMBLE_NBYTES` bytes.

    Raises:
        TruncatedError: fewer bytes than that.
        FormatError: this is no frame, or one that only a newer version can read.
    """
    return _read_preamble(memoryview(head))[0]


def is_checksummed(head: Buffer) -> bool:
    """Whether a frame has a checksum, from its first `PREAMBLE_NBYTES` bytes; raises as above."""
    return _read_preamble(memoryview(head))[2]


def _filling(header_nbytes: int) -> int:
    """Zero bytes after the header, so that arrays in the payload are aligned."""
    return -(PREAMBLE_NBYTES + header_nbytes) % _ALIGNMENT


def _checksum(parts: list[bytes | memoryview]) -> int:
    """CRC-32, never 0: a frame whose flag was lost is told by a checksum without a flag."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value or 1


def _sections_of(
    source: RouteSample | RoutedExperts, record: RoutedExperts, codec: str
) -> dict[str, Bytes]:
    sections = {"token_hashes": _as_bytes(record.token_hash_T, "<u4")}
    if isinstance(source, RouteSample):
        sections["token_ids"] = _as_bytes(source.token_ids, "<i4")
    sections["ids"] = encode_ids(codec, record.ids_TLK, record.schema)
    if not record.complete:
        sections["valid"] = np.packbits(record.valid_T, bitorder="little")
    return sections


def _header_of(
    source: RouteSample | RoutedExperts,
    record: RoutedExperts,
    codec: str,
    sections: dict[str, Bytes],
) -> FrameHeader:
    schema = record.schema
    return FrameHeader(
        layer_ids=schema.layer_ids,
        num_experts=schema.num_experts,
        top_k=schema.top_k,
        num_hidden_layers=schema.num_hidden_layers,
        num_rows=record.num_rows,
        sections=tuple(Section(name=name, nbytes=part.nbytes) for name, part in sections.items()),
        start=record.start,
        prefix_hash=record.prefix_hash,
        codec=codec,
        provenance=tuple(
            (span.start, span.stop, span.weight_version, int(span.origin))
            for span in record.provenance
        ),
        num_prompt_tokens=source.num_prompt_tokens if isinstance(source, RouteSample) else 0,
        meta=source.meta if isinstance(source, RouteSample) else {},
    )


def _as_bytes(array: npt.NDArray[np.integer], dtype: str) -> Bytes:
    return np.ascontiguousarray(array.astype(dtype, copy=False)).view(np.uint8)


def _read_preamble(data: memoryview) -> tuple[int, int, bool, int]:
    """Length of the frame, length of its header, whether it has a checksum, and that checksum."""
    if bytes(data[:4]) != MAGIC[: len(data)]:
        raise FormatError(
            f"this is no frame of routed experts: it begins with {bytes(data[:4]).hex(' ')}, not "
            f"{MAGIC.hex(' ')}"
        )
    if len(data) < PREAMBLE_NBYTES:
        raise TruncatedError(
            f"a frame begins with {PREAMBLE_NBYTES} bytes, but the data ends at {len(data)}"
        )
    _, version, flags, header_nbytes, payload_nbytes, value = _PREAMBLE.unpack_from(data)
    if not 1 <= version <= VERSION:
        raise FormatError(
            f"the frame has version {version}, and this routebook reads versions up to {VERSION}; "
            "install a newer one"
        )
    if flags & ~_CHECKSUMMED:
        raise FormatError(f"the frame has unknown flags {flags:#04x}; install a newer routebook")
    if not flags and value:
        raise DamagedError("the frame has a checksum, but says that it has none")
    nbytes = PREAMBLE_NBYTES + header_nbytes + _filling(header_nbytes) + payload_nbytes
    return nbytes, header_nbytes, bool(flags), value


def _read_header(data: Bytes, header_nbytes: int) -> FrameHeader:
    if data[header_nbytes:].any():
        raise DamagedError("the bytes between header and payload are not zero")
    try:
        return _HEADER_DECODER.decode(data[:header_nbytes].data)
    # A deeply nested field that we do not know makes the decoder run out of stack.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"the frame's header cannot be read: {error}") from error


def _split_payload(header: FrameHeader, payload: Bytes) -> dict[str, Bytes]:
    names = [section.name for section in header.sections]
    if len(set(names)) < len(names):
        raise DamagedError(f"the frame's header lists a section twice: {', '.join(names)}")
    listed = sum(section.nbytes for section in header.sections)
    if listed != len(payload):
        raise DamagedError(
            f"the sections are said to be {listed} bytes long, but the payload is {len(payload)}"
        )
    return dict(_walk_sections(header, payload))


def _walk_sections(header: FrameHeader, payload: Bytes) -> Iterator[tuple[str, Bytes]]:
    at = 0
    for section in header.sections:
        yield section.name, payload[at : at + section.nbytes]
        at += section.nbytes


def _build(header: FrameHeader, sections: dict[str, Bytes]) -> RouteSample | RoutedExperts:
    record = _build_record(header, sections)
    if "token_ids" not in sections:
        if header.num_prompt_tokens or header.meta:
            raise DamagedError("the frame describes a sample, but its token ids are missing")
        return record
    num_tokens = sections["token_ids"].nbytes // 4
    return RouteSample(
        record=record,
        token_ids=_numbers(sections, "token_ids", num_tokens, "<i4").astype(np.int32, copy=False),
        num_prompt_tokens=header.num_prompt_tokens,
        meta=header.meta,
    )


def _build_record(header: FrameHeader, sections: dict[str, Bytes]) -> RoutedExperts:
    schema = RouteSchema(
        layer_ids=header.layer_ids,
        num_experts=header.num_experts,
        top_k=header.top_k,
        num_hidden_layers=header.num_hidden_layers,
    )
    # First the hashes: their length proves the number of rows that the others are sized by.
    hashes_T = _numbers(sections, "token_hashes", header.num_rows, "<u4")
    return RoutedExperts(
        schema=schema,
        ids_TLK=decode_ids(header.codec, _section(sections, "ids"), schema, header.num_rows),
        start=header.start,
        valid_T=_read_valid(sections, header.num_rows),
        provenance=tuple(_read_span(span) for span in header.provenance),
        prefix_hash=header.prefix_hash,
        token_hash_T=hashes_T.astype(np.uint32, copy=False),
    )


def _section(sections: dict[str, Bytes], name: str) -> Bytes:
    if name not in sections:
        raise DamagedError(f"the frame has no section {name!r}")
    return sections[name]


def _numbers(
    sections: dict[str, Bytes], name: str, count: int, dtype: str
) -> npt.NDArray[np.integer]:
    section = _section(sections, name)
    if len(section) != 4 * count:
        raise DamagedError(
            f"section {name!r} holds {len(section)} bytes; {count} numbers take {4 * count}"
        )
    return section.view(dtype)


def _read_valid(sections: dict[str, Bytes], num_rows: int) -> Mask:
    if "valid" not in sections:
        return np.ones(num_rows, np.bool_)
    bits = np.unpackbits(sections["valid"], bitorder="little").astype(np.bool_)
    if sections["valid"].nbytes != -(-num_rows // 8) or bits[num_rows:].any():
        raise DamagedError(f"section 'valid' is not one bit for each of {num_rows} rows")
    return bits[:num_rows]


def _read_span(span: tuple[int, int, int, int]) -> Provenance:
    start, stop, weight_version, origin = span
    if origin not in _ORIGINS:
        raise FormatError(f"rows of unknown origin {origin}; install a newer routebook")
    return Provenance(start, stop, weight_version, Origin(origin))
