"""docs/api.md and docs/store-api.md: what the comments of proto/ say, ready to be read."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PROTOS = Path(__file__).resolve().parents[2] / "proto"

_ENGINE = """\
# API of the engine

What clients speak to: the gRPC service `engine.v1.Engine`. The engine listens on a Unix socket, \
or on a TCP port of the loopback interface (`engine serve --listen`). gRPC names a socket \
`unix:/absolute/path`. There is no TLS and no authentication: who may open the socket may ask.

Beside it is `grpc.health.v1.Health`: SERVING while the engine takes requests, NOT_SERVING while \
it loads its model, stalls or stops. With `engine serve --reflection` tools can ask what is served.

[`examples/`](../examples/README.md) has a client in Python and one in Node. They need \
[`engine.proto`](../proto/engine/v1/engine.proto) alone, as would one in any language that gRPC \
knows.

Fields that a message does not set have their type's zero value; *optional* ones can be told from \
it. Numbers before the names are those on the wire, and never change their meaning.
"""

_STORE = """\
# API of the cachestore

What the engine and `cachestore-admin` call: the gRPC service `cachestore.v1.Cachestore`, with \
`grpc.health.v1.Health` beside it, on a Unix socket of the user. Clients of the \
[engine](api.md) have no need of it. What lies in the slabs is in \
[record-format.md](record-format.md).
"""

# Field numbers of descriptor.proto, which make up the paths that comments are filed under.
_SYNTAX, _SERVICE, _MESSAGE, _ENUM = 12, 6, 4, 5
_METHOD, _FIELD, _VALUE = 2, 2, 2

_SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}

Location = tuple[int, ...]


@dataclass(frozen=True)
class Comments:
    """Those of one file, by where they are."""

    leading: Mapping[Location, str]
    # What stands by itself above a declaration, and is about all that follow.
    detached: Mapping[Location, str]


def engine_page() -> str:
    return _ENGINE + _reference("engine/v1/engine.proto")


def store_page() -> str:
    return _STORE + _reference("cachestore/v1/cachestore.proto")


def _reference(name: str) -> str:
    described = _described(name)
    comments = _comments(described)
    (service,) = described.service
    lines = ["", comments.detached[_SYNTAX,], "", "## Calls", ""]
    lines += _service(service, comments)
    lines += ["## Messages", ""]
    for index, message in enumerate(described.message_type):
        lines += _message(message, (_MESSAGE, index), comments)
    for index, enum in enumerate(described.enum_type):
        lines += _enum(enum, (_ENUM, index), comments)
    return "\n".join(lines)


def _described(name: str) -> FileDescriptorProto:
    with tempfile.NamedTemporaryFile() as out:
        words = ["--include_source_info", f"--descriptor_set_out={out.name}", f"-I{PROTOS}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *words, name]
        subprocess.run(command, check=True)
        (described,) = FileDescriptorSet.FromString(Path(out.name).read_bytes()).file
    return described


def _comments(described: FileDescriptorProto) -> Comments:
    leading, detached = {}, {}
    for location in described.source_code_info.location:
        path = tuple(location.path)
        blocks = [*map(_text, location.leading_detached_comments)]
        if path == (_SYNTAX,):
            blocks.append(_text(location.leading_comments))
        else:
            leading[path] = _text(location.leading_comments)
        detached[path] = "\n\n".join(filter(None, blocks))
    return Comments(leading, detached)


def _text(comment: str) -> str:
    """As Markdown, which lines of a comment nearly are."""
    return "\n".join(line.removeprefix(" ") for line in comment.rstrip().split("\n"))


def _service(service: ServiceDescriptorProto, comments: Comments) -> Iterator[str]:
    for index, method in enumerate(service.method):
        path = (_SERVICE, 0, _METHOD, index)
        if comments.detached[path]:
            yield from (comments.detached[path], "")
        yield from (f"### {method.name}", "", _signature(method), "", comments.leading[path], "")


def _signature(method: MethodDescriptorProto) -> str:
    assert not method.client_streaming
    stream = "stream of " if method.server_streaming else ""
    return f"{_link(method.input_type)} → {stream}{_link(method.output_type)}"


def _message(message: DescriptorProto, path: Location, comments: Comments) -> Iterator[str]:
    yield from (f"### {message.name}", "")
    fields = [(*path, _FIELD, index) for index in range(len(message.field))]
    paragraphs = [comments.leading.get(path, ""), *(comments.detached[field] for field in fields)]
    for paragraph in filter(None, paragraphs):
        yield from (paragraph, "")
    if not message.field:
        yield from ("No fields.", "")
        return
    yield from ("| | field | type | |", "|---:|---|---|---|")
    for field, where in zip(message.field, fields, strict=True):
        kind = _type(field, message)
        yield f"| {field.number} | `{field.name}` | {kind} | {_cell(comments.leading[where])} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if not field.type_name:
        name = _SCALARS[field.type]
    elif field.type_name.endswith("Entry") and message.nested_type:
        (entry,) = (n for n in message.nested_type if field.type_name.endswith(f".{n.name}"))
        return f"map of {' to '.join(_type(each, entry) for each in entry.field)}"
    else:
        name = _link(field.type_name)
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return f"list of {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _enum(enum: EnumDescriptorProto, path: Location, comments: Comments) -> Iterator[str]:
    yield from (f"### {enum.name}", "", comments.leading[path], "")
    yield from ("| | value | |", "|---:|---|---|")
    for index, value in enumerate(enum.value):
        comment = comments.leading[*path, _VALUE, index] or "Never sent."
        yield f"| {value.number} | `{value.name}` | {_cell(comment)} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).replace("|", "\\|")


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"
