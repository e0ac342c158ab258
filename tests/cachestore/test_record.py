import hashlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore import record
from cachestore.record import ArraySpec, PartSpec, RecordError, Schema

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64", "float16", "bfloat16", "float32")

array_specs = st.builds(
    ArraySpec,
    name=st.text(min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 4),
    width=st.integers(1, 65),
)
encodings = st.dictionaries(
    st.sampled_from(["name", "bits", "group_size", "seed"]),
    st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
)
part_specs = st.builds(
    PartSpec,
    kind=st.just("kv"),
    name=st.sampled_from(["keys", "values"]),
    layers=st.sets(st.integers(0, 2**32), min_size=1, max_size=4).map(sorted).map(tuple),
    encoding=encodings,
    arrays=st.lists(array_specs, min_size=1, max_size=3).map(tuple),
)
schemas = st.builds(
    Schema, codec=st.text(max_size=8), parts=st.lists(part_specs, max_size=4).map(tuple)
)


def example_schema() -> Schema:
    return Schema(
        "q8",
        (
            PartSpec(
                "kv",
                "keys",
                layers=(0, 3),
                encoding={"name": "affine", "bits": 8, "group_size": 32},
                arrays=(
                    ArraySpec("codes", "uint32", heads=1, width=8),
                    ArraySpec("scales", "float16", heads=1, width=1),
                    ArraySpec("biases", "float16", heads=1, width=1),
                ),
            ),
            PartSpec(
                "kv",
                "values",
                layers=(0, 3),
                encoding={"name": "none"},
                arrays=(ArraySpec("rows", "bfloat16", heads=1, width=5),),
            ),
        ),
    )


def example_path(rows: int) -> bytes:
    """Of rows 2 to 2 + `rows` of a sequence."""
    tokens = np.arange(5, 7 + rows, dtype="<u4").tobytes()
    return record.paths(bytes(range(32)), tokens, [range(2, 2 + rows)])[0]


def written(schema: Schema, rows: int, seed: int = 0) -> bytearray:
    layout = record.plan(schema, rows)
    buffer = bytearray(layout.record_bytes)
    record.write_header(layout, example_path(rows), buffer)
    random_bytes = np.random.default_rng(seed)
    for view in layout.views(buffer):
        view.view(np.uint8)[...] = random_bytes.integers(0, 256, view.view(np.uint8).shape)
    return buffer


@given(schemas, st.integers(1, 300))
def test_round_trip(schema: Schema, rows: int) -> None:
    buffer = written(schema, rows)
    parsed = record.read(memoryview(buffer))
    assert parsed == record.plan(schema, rows)
    for (part, array), view, offset in zip(
        schema.arrays, parsed.views(buffer), parsed.offsets, strict=True
    ):
        assert view.shape == (len(part.layers), array.heads, rows, array.width)
        assert offset % record.ALIGNMENT == 0
        assert view.tobytes() == bytes(buffer[offset : offset + view.nbytes])


@given(schemas, st.integers(1, 2000))
def test_reserved_bytes_are_enough(schema: Schema, rows: int) -> None:
    layout = record.plan(schema, rows)
    payload = sum(view.nbytes for view in layout.views(bytearray(layout.record_bytes)))
    assert payload == rows * (schema.row_bytes - record.TOKEN_BYTES)
    assert layout.record_bytes <= schema.overhead_bytes + rows * schema.row_bytes
    assert layout.record_bytes - rows * schema.row_bytes > schema.overhead_bytes - 1024


@given(schemas, st.integers(1, 50))
def test_any_msgpack_reader_opens_a_dump(schema: Schema, rows: int) -> None:
    buffer = written(schema, rows)
    unpacker = msgpack.Unpacker()
    unpacker.feed(buffer)
    header, *objects = (found for found in unpacker if found is not None)
    views = record.read(buffer).views(buffer)
    assert header["rows"] == rows
    assert objects == [example_path(rows), *(view.tobytes() for view in views)]
    offsets = [array["offset"] for part in header["parts"] for array in part["arrays"]]
    for offset, view in zip(offsets, views, strict=True):
        assert view.tobytes() == bytes(buffer[offset : offset + view.nbytes])


def test_a_longer_buffer_is_fine() -> None:
    buffer = written(example_schema(), 3)
    layout = record.read(buffer + bytes(256))
    assert layout.record_bytes == len(buffer)


def test_a_record_like_the_one_before_is_the_same_object() -> None:
    first = record.read(written(example_schema(), 3, seed=1))
    assert record.read(written(example_schema(), 3, seed=2), like=first) is first
    assert record.read(written(example_schema(), 4), like=first).rows == 4
    with pytest.raises(RecordError):
        record.read(written(example_schema(), 3)[:-1], like=first)


def test_a_reader_of_read_only_memory_cannot_write() -> None:
    buffer = memoryview(written(example_schema(), 3)).toreadonly()
    assert not any(view.flags.writeable for view in record.read(buffer).views(buffer))


@given(schemas, st.integers(1, 50), st.data())
def test_a_cut_record_is_refused(schema: Schema, rows: int, data: st.DataObject) -> None:
    buffer = written(schema, rows)
    end = data.draw(st.integers(0, len(buffer) - 1))
    with pytest.raises(RecordError):
        record.read(memoryview(buffer)[:end])


def test_paths_are_what_the_document_says() -> None:
    namespace, tokens = bytes(range(32)), np.arange(100, 110, dtype="<u4").tobytes()
    before = [hashlib.sha256(namespace + tokens[: 4 * start]).digest() for start in range(10)]
    spans = [range(4, 9), range(2), range(4, 5), range(9, 10)]  # in any order
    assert record.paths(namespace, tokens, spans) == [
        before[4] + tokens[16:36],
        before[0] + tokens[:8],
        before[4] + tokens[16:20],
        before[9] + tokens[36:],
    ]


@pytest.mark.parametrize("rows", [range(-1, 2), range(3, 3), range(3, 2), range(9, 11)])
def test_rows_outside_of_a_sequence_have_no_path(rows: range) -> None:
    with pytest.raises(RecordError, match="outside"):
        record.paths(bytes(32), bytes(40), [range(3), rows])


@pytest.mark.parametrize(
    ("layers", "said"),
    [((0,), "0"), ((0, 1, 2, 5), "0 to 2, 5"), ((3, 7, 8), "3, 7 to 8"), ((), "")],
)
def test_layers_are_said_in_runs(layers: tuple[int, ...], said: str) -> None:
    assert record.ranges(layers) == said


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-1, 0)])
def test_layers_ascend(layers: tuple[int, ...]) -> None:
    with pytest.raises(RecordError, match="layers"):
        PartSpec("kv", "keys", layers, {}, (ArraySpec("rows", "uint8", 1, 1),))


@given(st.integers(1, 20), st.data())
def test_a_record_belongs_to_its_own_path_only(rows: int, data: st.DataObject) -> None:
    buffer = written(example_schema(), rows)
    layout = record.read(buffer)
    path = bytearray(example_path(rows)[: data.draw(st.integers(33, 32 + 4 * rows))])
    assert layout.belongs(buffer, bytes(path))
    path[data.draw(st.integers(0, len(path) - 1))] ^= data.draw(st.integers(1, 255))
    assert not layout.belongs(buffer, bytes(path))


def refused_or_within(buffer: bytes | bytearray) -> None:
    try:
        parsed = record.read(memoryview(buffer))
    except RecordError:
        return
    assert parsed.record_bytes <= len(buffer)
    assert sum(view.nbytes for view in parsed.views(buffer)) < len(buffer)


@given(schemas, st.integers(1, 20), st.data())
def test_a_flipped_bit_is_refused_or_harmless(
    schema: Schema, rows: int, data: st.DataObject
) -> None:
    buffer = written(schema, rows)
    buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    refused_or_within(buffer)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RecordError):
        record.read(noise)


values: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value: object) -> list[tuple[object, object]]:
    """Every (container, key) in a tree of lists and maps."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, inner in items for place in [(value, key), *places(inner)]]


@given(schemas, st.integers(1, 20), st.data())
def test_a_lying_header_is_refused_or_harmless(
    schema: Schema, rows: int, data: st.DataObject
) -> None:
    buffer = written(schema, rows)
    unpacker = msgpack.Unpacker()
    unpacker.feed(buffer)
    header = unpacker.unpack()
    end = unpacker.tell()
    for container, key in data.draw(st.lists(st.sampled_from(places(header)), min_size=1)):
        container[key] = data.draw(values)  # type: ignore[index]
    refused_or_within(msgpack.packb(header) + buffer[end:])


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 1},
        {"format": "something else"},
        {"rows": 0},
        {"rows": -1},
        {"rows": True},
        {"rows": 2},
        {"rows": 2**40},
        {"codec": 3},
        {"parts": []},
        {"more": 1},
    ],
)
def test_lies_by_name(lie: dict[str, object]) -> None:
    buffer = written(example_schema(), 1)
    unpacker = msgpack.Unpacker()
    unpacker.feed(buffer)
    header = unpacker.unpack()
    forged = msgpack.packb(header | lie)
    with pytest.raises(RecordError):
        record.read(forged + buffer[unpacker.tell() :])


def test_offsets_that_overlap_are_refused() -> None:
    buffer = written(example_schema(), 3)
    unpacker = msgpack.Unpacker()
    unpacker.feed(buffer)
    header = unpacker.unpack()
    codes, scales, _ = header["parts"][0]["arrays"]
    scales["offset"] = codes["offset"]
    with pytest.raises(RecordError):
        record.read(msgpack.packb(header) + buffer[unpacker.tell() :])


def test_an_array_larger_than_msgpack_allows_is_refused() -> None:
    schema = Schema(
        "none", (PartSpec("kv", "keys", (0,), {}, (ArraySpec("rows", "uint8", 1, 16),)),)
    )
    with pytest.raises(RecordError, match="4294967296 bytes"):
        record.plan(schema, 2**28)


def test_a_header_that_is_too_long_is_refused() -> None:
    part = PartSpec("kv", "keys", (0,), {}, (ArraySpec("rows", "uint8", 1, 2),))
    with pytest.raises(RecordError, match="too long"):
        record.plan(Schema("none", (part,) * 1000), 1)


def hexdump(data: bytes) -> str:
    """As `hexdump -C` prints it."""
    lines: list[str] = []
    previous = b""
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        if row == previous and len(row) == 16:
            if lines[-1] != "*":
                lines.append("*")
            continue
        previous = row
        digits = [f"{byte:02x}" for byte in row]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        halves = f"{' '.join(digits[:8])}  {' '.join(digits[8:])}"
        lines.append(f"{start:08x}  {halves:<48}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}"])


def test_the_document_shows_a_real_record() -> None:
    document = Path(__file__).parents[2] / "docs" / "record-format.md"
    layout = record.plan(example_schema(), 3)
    buffer = bytearray(layout.record_bytes)
    record.write_header(layout, example_path(3), buffer)
    for place, view in enumerate(layout.views(buffer), start=1):
        view.view(np.uint8)[...] = 0x11 * place
    assert f"```\n{hexdump(bytes(buffer))}\n```" in document.read_text("utf-8")
