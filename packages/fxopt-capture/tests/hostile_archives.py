"""Archives with something in them that would leave a mark if it ran, and valid ones that were damaged at random.

Every attack is a function that takes the entries of a valid archive, by name, and the file that it would make.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

Entries = dict[str, bytes]
DOCUMENT, LEDGER, WEIGHTS = "fxopt.json", "ledger.json", "weights.safetensors"


def entries_of(path: Path | io.BytesIO) -> Entries:
    """Return the entries of an archive."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(entries: Mapping[str, bytes], further: list[tuple[str, bytes]] | None = None) -> bytes:
    """Return an archive of these entries, and of further ones whose names may be there already."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in [*entries.items(), *(further or [])]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two entries of one name
                archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def expression(mark: Path) -> str:
    """Return Python code that makes a file."""
    return f"open({str(mark)!r}, 'w')"


def edited(entries: Entries, name: str, change: Callable[[Any], None]) -> Entries:
    """Return entries of which one, of JSON, was changed."""
    data = json.loads(entries[name])
    change(data)
    return {**entries, name: json.dumps(data).encode()}


def with_header(entries: Entries, change: Callable[[Any], None]) -> Entries:
    """Return entries in which the header of the tensors was changed."""
    content = entries[WEIGHTS]
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return {**entries, WEIGHTS: len(text).to_bytes(8, "little") + text + content[8 + length :]}


def in_document(change: Callable[[Any, Path], None]) -> Callable[[Entries, Path], bytes]:
    """Return the attack that changes fxopt's JSON beside the program."""
    return lambda entries, mark: packed(edited(entries, DOCUMENT, lambda document: change(document, mark)))


def _row(**row: Any) -> Callable[[Any, Path], None]:
    """Let a node that a graph calls be another one; ``MARK`` is the mark."""

    def change(document: Any, mark: Path) -> None:
        text = json.dumps(row).replace("MARK", str(mark)).replace("CODE", json.dumps(expression(mark))[1:-1])
        document["graph"]["rows"][4].update({"kwargs": {}, **json.loads(text)})

    return change


def _attribute(key: str, value: Any) -> Callable[[Any, Path], None]:
    return lambda document, mark: document["modules"][1]["attributes"].append([key, value])


def _child(name: str, *args: str) -> Callable[[Any, Path], None]:
    """Let a module have the name of a method of graph modules, and the graph call it."""

    def change(document: Any, mark: Path) -> None:
        document["modules"].append({**document["modules"][1], "name": name, "parameters": []})
        given = [text.replace("MARK", str(mark)) for text in args]
        document["graph"]["rows"][4].update(op="call_module", target=name, args=given, kwargs={})

    return change


def _input_name(document: Any, mark: Path) -> None:
    document["graph"]["rows"][0].update(target=f"x={expression(mark)}")


def _condition(document: Any, mark: Path) -> None:
    document["guards"]["conditions"] = [f"{expression(mark)} is None"]


def _size(text: str) -> Callable[[Any, Path], None]:
    """Let a size that a node notes be an expression."""
    return lambda document, mark: document["shapes"][0].__setitem__(1, [text.replace("CODE", expression(mark)), 4])


def _bounds(bounds: list[Any]) -> Callable[[Any, Path], None]:
    """Add a size with this hint and range."""
    return lambda document, mark: document["sizes"].append(["s77", bounds])


def _container(name: str, context: Any) -> Callable[[Any, Path], None]:
    """Let the outputs of the graph be in a container."""
    spec = [name, context, [None]]
    return lambda document, mark: document["graph"].update(
        containers={"names": ["x"], "inputs": ["builtins.tuple", None, [None]], "outputs": spec}
    )


def _deep(document: Any, mark: Path) -> None:
    spec: Any = None
    for _ in range(200):
        spec = ["builtins.tuple", None, [spec]]
    document["graph"].update(containers={"names": ["x"], "inputs": spec, "outputs": None})


def _tensor(**changes: Any) -> Callable[[Entries, Path], bytes]:
    return in_document(lambda document, mark: document["tensors"][0].update(changes))


def in_header(change: Callable[[Any], None]) -> Callable[[Entries, Path], bytes]:
    """Return the attack that changes the header of the tensors."""
    return lambda entries, mark: packed(with_header(entries, change))


def _source_form(mark: Path) -> Any:
    return {"source": {"name": f"x), {expression(mark)}, (", "target": "t", "graph_id": 1, "pass_name": "p"}}


def _source_as_type(document: Any, mark: Path) -> None:
    document["graph"]["rows"][0].update(type=_source_form(mark))


def _source_as_argument(document: Any, mark: Path) -> None:
    document["graph"]["rows"][4].update(args=[{"node": 0}, _source_form(mark)])


FUNCTION, METHOD = "call_function", "call_method"
X: dict[str, Any] = {"node": 0}
ATTACKS: dict[str, Callable[[Entries, Path], bytes]] = {
    "an entry twice": lambda entries, mark: packed(entries, [(DOCUMENT, entries[DOCUMENT])]),
    "code for a size": in_document(_size("CODE")),
    "code within a size": in_document(_size("s0 + CODE")),
    "an attribute in a size": in_document(_size("s0.__class__")),
    "a tower for a size": in_document(_size("2**2**2**2**2**2")),
    **{
        f"{bounds} as hint and range of a size": in_document(_bounds(bounds))
        for bounds in ([2, 4, None], [2, None, 1], [-1, -1, None], [None, None, -1], [2, "0", None], [2])
    },
    "a deep size": in_document(_size("-" * 15_000 + "1")),
    "an enumeration": in_document(_container("builtins.dict", [{"__enum__": True, "fqn": "antigravity:A"}])),
    "a defaultdict": in_document(_container("collections.defaultdict", [{"name": "antigravity:x"}, ["a"]])),
    "a defaultdict that calls": in_document(_container("collections.defaultdict", [{"name": "builtins:len"}, ["a"]])),
    "a type that is imported": in_document(_container("antigravity.Output", ["a"])),
    "a class within a cache": in_document(
        _container("builtins.dict", [{"dict": [["_t", "obj"], ["p", "subprocess:Popen"]]}])
    ),
    "deep containers": in_document(_deep),
    "a tensor beyond its entry": _tensor(shape=[1 << 20, 1 << 20]),
    "a tensor without strides": _tensor(shape=[1 << 20, 1 << 20], stride=[0, 0]),
    "a tensor before its entry": _tensor(offset=-64),
    "a tensor of no dtype": _tensor(dtype="load"),
    "a tensor elsewhere": _tensor(device="nowhere"),
    "a tensor of another entry": _tensor(entry="other"),
    "a header beyond the end": in_header(
        lambda header: header.update({name: {**row, "data_offsets": [0, 1 << 40]} for name, row in header.items()})
    ),
    "a pickle for tensors": lambda entries, mark: packed({**entries, WEIGHTS: pickle.dumps(mark)}),
    "a pickle for a document": lambda entries, mark: packed({**entries, DOCUMENT: pickle.dumps(mark)}),
    "a function of Python": in_document(_row(op=FUNCTION, target={"name": "os:system"}, args=["touch MARK"])),
    "a function as text": in_document(_row(op=FUNCTION, target="os:system", args=["touch MARK"])),
    "a class": in_document(lambda document, mark: document["modules"][1].update({"class": "subprocess:Popen"})),
    "a class of torch": in_document(
        lambda document, mark: document["modules"][1].update({"class": "torch.nn.parameter:Parameter"})
    ),
    "a member of an enumeration": in_document(_row(args=[{"enum": ["http:HTTPStatus", 200]}])),
    "a named tuple": in_document(_row(args=[{"namedtuple": ["platform:uname_result", []]}])),
    "the state of a module": in_document(_attribute("_modules", 1)),
    "a name of a node": in_document(_row(name="x = 1; import os")),
    "a key to sort by": in_document(
        _row(op=FUNCTION, target={"name": "builtins:max"}, args=["MARK", "x"], kwargs={"key": X})
    ),
    "a function of the file for a key": in_document(
        _row(op=FUNCTION, target={"name": "builtins:max"}, args=[["MARK"]], kwargs={"key": {"name": "builtins:str"}})
    ),
    "aten.from_file": in_document(
        _row(op=FUNCTION, target={"name": "torch:ops.aten.from_file.default"}, args=["MARK", True, 9])
    ),
    "aten.save": in_document(_row(op=FUNCTION, target={"name": "torch:ops.aten.save.default"}, args=[X, "MARK"])),
    "a library by ops": in_document(_row(op=FUNCTION, target={"name": "torch:ops.load_library"}, args=["MARK"])),
    "numpy": in_document(_row(op=METHOD, target="numpy", args=[X])),
    "tofile": in_document(_row(op=METHOD, target="tofile", args=[X, "MARK"])),
    "apply_": in_document(_row(op=METHOD, target="apply_", args=[X, {"name": "builtins:getattr"}])),
    "a hook": in_document(_row(op=METHOD, target="register_hook", args=[X, {"name": "builtins:str"}])),
    "shared memory": in_document(_row(op=METHOD, target="share_memory_", args=[X])),
    "a private attribute": in_document(_row(op=FUNCTION, target={"name": "builtins:getattr"}, args=[X, "__class__"])),
    "a method by getattr": in_document(_row(op=FUNCTION, target={"name": "builtins:getattr"}, args=[X, "numpy"])),
    "a function among arguments": in_document(
        _row(op=FUNCTION, target={"name": "torch:relu"}, args=[{"name": "math:sqrt"}])
    ),
    "to_folder": in_document(_child("to_folder", "MARK")),
    "to_folder in other letters": in_document(_child("\uff54o_folder", "MARK")),
    "print_readable": in_document(_child("print_readable")),
    "a module that is code": in_document(_child('x"), CODE, ("')),
    "an input of the document": in_document(_input_name),
    "a condition of the document": in_document(_condition),
    "code for a type": in_document(_source_as_type),
    "code for an argument": in_document(_source_as_argument),
    **{
        f"{name} of {args}": in_document(_row(op=FUNCTION, target={"name": name}, args=args))
        for name, args in (
            ("builtins:pow", [10, 10**9]),
            ("_operator:pow", [10, 10**9]),
            ("_operator:lshift", [1, 10**10]),
            ("_operator:mod", ["%999999999d", 1]),
            ("_operator:ipow", [X, 10**9]),
            ("_operator:mul", [[0], 10**11]),
            ("builtins:range", [10**12]),
            ("builtins:round", [5, -(10**9)]),
            ("torch:arange", [0, 1, 1e-12]),
            ("torch:zeros", [10**6, 10**6]),
            ("torch:ops.aten.full.default", [[10**12], 1]),
            ("torch:ops.aten.repeat.default", [X, [10**9, 10**9]]),
            ("torch:ops.aten.expand.default", [X, [2**40, 3, 4]]),
            ("torch:ops.aten.fft_fft.default", [X, 10**11]),
            ("torch:ops.aten.fft_fftfreq.default", [10**11]),
            ("torch:ops.aten.fft_fft2.default", [X, [10**6, 10**6]]),
            ("torch:ops.aten.linalg_vander.default", [X, 10**11]),
            ("torch:eye", [10**6]),
            ("torch:ops.aten.diag_embed.default", [X, 10**6]),
            ("torch:ops.aten.constant_pad_nd.default", [X, [0, 10**11]]),
            ("torch:ops.aten.upsample_nearest2d.default", [X, [10**6, 10**6]]),
            ("torch:ops.aten.adaptive_avg_pool2d.default", [X, [10**6, 10**6]]),
            ("torch:ops.aten.bincount.default", [X, None, 10**11]),
        )
    },
    "a power by a method": in_document(_row(op=METHOD, target="__pow__", args=[10, 10**9])),
    "a shift by a method": in_document(_row(op=METHOD, target="__rlshift__", args=[10**10, 1])),
    "a repetition by a method": in_document(_row(op=METHOD, target="repeat", args=[X, 10**9, 10**9])),
    "factorial": in_document(_row(op=FUNCTION, target={"name": "math:factorial"}, args=[10**7])),
}
"""What a stranger may try, by name."""


# -- files that are no archives, or too large ones


def compressed(entries: Entries, size: int) -> bytes:
    """Return an archive whose document is a bomb: spaces, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, b" " * size if name == DOCUMENT else content)
    return buffer.getvalue()


def overlapping(entries: Entries, count: int) -> bytes:
    """Return an archive in which many entries lie in the same place of the file."""
    content = packed({**entries, "x1000": bytes(1 << 20)})
    end = content.rindex(b"PK\x05\x06")
    directory_size, directory = struct.unpack("<II", content[end + 12 : end + 20])
    rows = content[directory : directory + directory_size]
    at = rows.index(b"x1000") - 46
    row = rows[at : at + 51]
    copies = b"".join(row.replace(b"x1000", f"x{1000 + n}".encode()) for n in range(1, count))
    numbers = [content[end + 8] + count - 1] * 2
    head = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *numbers, len(rows + copies), directory, 0)
    return content[:directory] + rows + copies + head


# -- damage


def damaged(content: bytes, entries: Entries, random: Random) -> bytes:
    """Return an archive that was damaged at random: its bytes, its entries, or the JSON in them."""
    kind = random.randrange(6)
    if kind == 0:
        spoilt = bytearray(content)
        for _ in range(random.randint(1, 20)):
            spoilt[random.randrange(len(spoilt))] ^= 1 << random.randrange(8)
        return bytes(spoilt)
    if kind == 1:
        start, stop = sorted(random.randrange(len(content)) for _ in range(2))
        return random.choice([content[:start], content[start:], content[:start] + content[stop:]])
    names = list(entries)
    if kind == 2:
        one, other = random.sample(names, 2)
        return packed({**entries, one: entries[other], other: entries[one]})
    if kind == 3:
        return packed(with_header(entries, lambda header: _mutate(header, random)))
    name = random.choice([DOCUMENT, DOCUMENT, LEDGER])
    data = json.loads(entries[name])
    for _ in range(random.randint(1, 3)):
        if data:
            _mutate(data, random)
    return packed({**entries, name: json.dumps(data).encode()})


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 1e308, "", "x", "os.system", "self", "builtins.tuple",
    "torch.ops.aten.relu.default",
    "2*s0", [], {}, [[]], {"as_int": 3}, {"node": 1}, {"name": "torch:relu"},
)  # fmt: skip


def _mutate(data: Any, random: Random) -> None:
    """Change one value of JSON, wherever it is."""
    places: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        each = waiting.pop()
        keys = each.keys() if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        places += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    holder, key = random.choice(places)
    other, at = random.choice(places)
    action = random.randrange(4)
    if action == 0:
        holder[key] = random.choice(_VALUES)
    elif action == 1:
        holder[key] = json.loads(json.dumps(other[at]))
    elif action == 2:
        del holder[key]
    elif isinstance(holder[key], int | str):
        value = holder[key]
        holder[key] = value + random.choice([-1, 1, 10**6]) if isinstance(value, int) else value[::-1] + "0"
