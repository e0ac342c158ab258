"""The bytes of one record: rows of a token sequence, or a checkpoint of the state behind them.

A record is one msgpack stream, so that any msgpack reader can open a dump of it:

    header map | nil nil ... bin(path) | nil ... bin(array 0) | nil ... bin(array 1) | ...
               ^ pads            ^ a multiple of 64 bytes from the start of the record

Every byte but those inside the path and the arrays follows from the schema and the number of
rows, and the reader insists on them: a record is valid only if it is what `write_header` would
have written. So nothing that a header claims about sizes and places has to be believed. The path
says whose rows they are, so that a reader need not believe that either. See
docs/record-format.md.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

FORMAT: Final = "mlx-cachestore record"
VERSION: Final = 3
ALIGNMENT: Final = 64
HEADER_BYTES_MAX: Final = 64 * 1024
ROWS_MAX: Final = 2**32 - 1
TOKEN_BYTES: Final = 4

# What a part's encoding is, as its codec names it: opaque here.
Encoding = Mapping[str, int | str]
Buffer = memoryview | bytearray | bytes

# numpy has no bfloat16; its bits travel as uint16.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}
_NIL: Final = b"\xc0"
_BIN32: Final = 0xC6
_BIN32_BYTES: Final = 5
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class RecordError(ValueError):
    """The bytes are not a record, not one of this version, or not of the expected schema."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a part: `heads * width` elements for each row and layer."""

    name: str
    dtype: str
    heads: int
    width: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise RecordError(f"array {self.name!r} has unknown dtype {self.dtype!r}")
        if self.heads < 1 or self.width < 1:
            raise RecordError(f"array {self.name!r} is empty: {self.heads} x {self.width}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer."""
        return self.heads * self.width * self.numpy_dtype.itemsize


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Keys, say, of some layers that have the same kind, shape and encoding.

    `layers` counts the model's layer caches from 0; they ascend, and need not be neighbours.
    """

    kind: str
    name: str
    layers: tuple[int, ...]
    encoding: Encoding
    arrays: tuple[ArraySpec, ...]

    def __post_init__(self) -> None:
        if not self.layers or not self.arrays:
            raise RecordError(f"part {self.name!r} holds no layers or no arrays")
        if self.layers[0] < 0 or any(a >= b for a, b in itertools.pairwise(self.layers)):
            raise RecordError(f"part {self.name!r} holds layers that do not ascend")


@dataclass(frozen=True, slots=True)
class Schema:
    """All that a header says beside rows and offsets: records of equal schemas can be joined.

    Without parts a record holds nothing but the tokens of its rows.
    """

    codec: str
    parts: tuple[PartSpec, ...]

    @property
    def arrays(self) -> Iterator[tuple[PartSpec, ArraySpec]]:
        """Every array, in the order in which a record stores them."""
        return ((part, array) for part in self.parts for array in part.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row adds to a record: its token, and all layers of it."""
        return TOKEN_BYTES + sum(len(part.layers) * array.row_bytes for part, array in self.arrays)

    @property
    def overhead_bytes(self) -> int:
        """Bound on what a record takes beside its rows, however many they are."""
        count = sum(1 for _ in self.arrays)
        longest = _pack_header(self, ROWS_MAX, [2**64 - 1] * count)
        return len(longest) + _DIGEST_BYTES + (1 + count) * (_BIN32_BYTES + ALIGNMENT - 1)


@dataclass(frozen=True)
class Record:
    """Where everything is in a record: planned for a writer, or read from one.

    Offsets count from the start of the record; `offsets` are those of the arrays' bytes, in
    schema order.
    """

    schema: Schema
    rows: int
    path_offset: int
    offsets: tuple[int, ...]

    @cached_property
    def record_bytes(self) -> int:
        return (self.path_offset, *self.offsets)[-1] + self._sizes[-1]

    @cached_property
    def frame(self) -> tuple[tuple[int, bytes], ...]:
        """(offset, bytes) of everything but the path and the arrays."""
        frame = []
        end = 0
        data = _pack_header(self.schema, self.rows, self.offsets)
        for offset, size in zip((self.path_offset, *self.offsets), self._sizes, strict=True):
            pads = offset - end - len(data) - _BIN32_BYTES
            frame.append((end, data + _NIL * pads + bytes([_BIN32]) + size.to_bytes(4, "big")))
            end, data = offset + size, b""
        return tuple(frame)

    def frames(self, buffer: Buffer) -> bool:
        """Whether `buffer` begins with a record laid out like this one."""
        return self.record_bytes <= len(buffer) and all(
            buffer[offset : offset + len(data)] == data for offset, data in self.frame
        )

    @property
    def _sizes(self) -> list[int]:
        return _sizes(self.schema, self.rows)

    def belongs(self, buffer: Buffer, path: bytes) -> bool:
        """Whether the first rows of the record in `buffer` are those of `path` (see `paths`)."""
        assert _DIGEST_BYTES < len(path) <= _path_bytes(self.rows)
        return bytes(buffer[self.path_offset : self.path_offset + len(path)]) == path

    def views(self, buffer: Buffer) -> list[npt.NDArray[Any]]:
        """The arrays, shape (layers, heads, rows, width), as views of `buffer`.

        Writable if the buffer is. bfloat16 appears as uint16.
        """
        assert len(buffer) >= self.record_bytes
        views = []
        for (part, array), offset in zip(self.schema.arrays, self.offsets, strict=True):
            shape = (len(part.layers), array.heads, self.rows, array.width)
            flat = np.frombuffer(buffer, array.numpy_dtype, math.prod(shape), offset)
            views.append(flat.reshape(shape))
        return views


def plan(schema: Schema, rows: int) -> Record:
    """Lays out a record of `rows` rows. RecordError when its header would be too long."""
    if not 1 <= rows <= ROWS_MAX:
        raise RecordError(f"a record cannot have {rows} rows")
    sizes = _sizes(schema, rows)
    if max(sizes) >= 2**32:
        raise RecordError(f"an array of {max(sizes)} bytes does not fit in a record")
    start = 0
    while True:
        # The header holds the offsets, whose length in msgpack grows with their value, and it
        # comes before them: push the arrays back until it fits.
        offsets = []
        end = start
        for size in sizes:
            offsets.append(_align(end + _BIN32_BYTES))
            end = offsets[-1] + size
        path_offset = offsets.pop(0)
        header_bytes = len(_pack_header(schema, rows, offsets))
        if header_bytes <= start:
            break
        start = header_bytes
    if header_bytes > HEADER_BYTES_MAX:
        raise RecordError(f"a header of {header_bytes} bytes is too long")
    return Record(schema, rows, path_offset, tuple(offsets))


def paths(namespace: bytes, tokens: bytes, spans: Sequence[range]) -> list[bytes]:
    """For rows [start, stop) of a sequence of packed tokens, what their record says they are.

    That is the SHA-256 of the namespace and of all tokens before them, and then their own tokens:
    the path of the first few rows of a record is a beginning of the path of all. RecordError for
    rows before the first or behind the last token.
    """
    if any(not 0 <= rows.start < rows.stop <= len(tokens) // TOKEN_BYTES for rows in spans):
        raise RecordError(f"rows outside of a sequence of {len(tokens) // TOKEN_BYTES} tokens")
    digest = hashlib.sha256(namespace)
    before: dict[int, bytes] = {}
    end = 0
    for start in sorted({rows.start for rows in spans}):
        digest.update(tokens[end * TOKEN_BYTES : start * TOKEN_BYTES])
        before[start], end = digest.digest(), start
    return [
        before[rows.start] + tokens[rows.start * TOKEN_BYTES : rows.stop * TOKEN_BYTES]
        for rows in spans
    ]


def write_header(record: Record, path: bytes, buffer: memoryview | bytearray) -> None:
    """Writes all of a record but the arrays' own bytes. `path`: see `paths`."""
    assert len(path) == _path_bytes(record.rows)
    for offset, data in ((record.path_offset, path), *record.frame):
        buffer[offset : offset + len(data)] = data


def read(buffer: Buffer, like: Record | None = None) -> Record:
    """Parses and checks a record that starts at byte 0 and ends within `buffer`; not its path.

    `like` is a record that it probably resembles; when it does, nothing is parsed. The header is
    copied first, so that a buffer that changes meanwhile can make the arrays' contents wrong but
    not their places. RecordError on anything unexpected.
    """
    if like is not None and like.frames(buffer):
        return like
    schema, rows = _parse_header(bytes(buffer[:HEADER_BYTES_MAX]))
    record = plan(schema, rows)
    if not record.frames(buffer):
        raise RecordError(f"{len(buffer)} bytes are not the record that their header implies")
    return record


def read_header(head: bytes) -> Record:
    """The layout that a record's header tells, for people: nothing but the header is looked at.

    `head` has the record's first HEADER_BYTES_MAX bytes, or all when there are fewer.
    """
    return plan(*_parse_header(head))


def ranges(layers: Sequence[int]) -> str:
    """Layers that ascend, for people: "0 to 2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _path_bytes(rows: int) -> int:
    return _DIGEST_BYTES + rows * TOKEN_BYTES


def _sizes(schema: Schema, rows: int) -> list[int]:
    """Bytes of the path and of each array."""
    return [
        _path_bytes(rows),
        *(len(part.layers) * rows * array.row_bytes for part, array in schema.arrays),
    ]


def _pack_header(schema: Schema, rows: int, offsets: Sequence[int]) -> bytes:
    place = iter(offsets)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "codec": schema.codec,
        "rows": rows,
        "parts": [
            {
                "kind": part.kind,
                "name": part.name,
                "layers": list(part.layers),
                "encoding": dict(part.encoding),
                "arrays": [
                    {
                        "name": array.name,
                        "dtype": array.dtype,
                        "shape": [len(part.layers), array.heads, rows, array.width],
                        "offset": next(place),
                    }
                    for array in part.arrays
                ],
            }
            for part in schema.parts
        ],
    }
    packed: bytes = msgpack.packb(header)
    return packed


def _parse_header(data: bytes) -> tuple[Schema, int]:
    unpacker = msgpack.Unpacker(max_buffer_size=HEADER_BYTES_MAX)
    unpacker.feed(data)
    try:
        header = unpacker.unpack()
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"no msgpack header: {error!r}") from error
    match header:
        case {"format": name, "version": version} if (name, version) != (FORMAT, VERSION):
            raise RecordError(f"{name!r} version {version}: {FORMAT!r} version {VERSION} expected")
        case {"format": _, "version": _, "codec": str(codec), "rows": int(rows), "parts": [*parts]}:
            return Schema(codec, tuple(_parse_part(part) for part in parts)), int(rows)
    raise RecordError("the header lacks a field")


def _parse_part(part: object) -> PartSpec:
    match part:
        case {
            "kind": str(kind),
            "name": str(name),
            "layers": [*layers],
            "encoding": {**items},
            "arrays": [*arrays],
        }:
            encoding: dict[str, int | str] = {}
            for key, value in items.items():
                if not isinstance(value, int | str) or isinstance(value, bool):
                    raise RecordError("an encoding has a field that is no number and no text")
                encoding[str(key)] = value
            if not all(isinstance(layer, int) for layer in layers):
                raise RecordError(f"part {name!r} holds a layer that is no number")
            specs = tuple(_parse_array(array) for array in arrays)
            return PartSpec(kind, name, tuple(map(int, layers)), encoding, specs)
    raise RecordError("a part of the header lacks a field")


def _parse_array(array: object) -> ArraySpec:
    match array:
        case {"name": str(name), "dtype": str(dtype), "shape": [_, int(heads), _, int(width)]}:
            return ArraySpec(name, dtype, int(heads), int(width))
    raise RecordError("an array of the header lacks a field")
