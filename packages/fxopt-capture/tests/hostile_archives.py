"""Archives with something in them that would leave a mark if it ran, and valid ones that were damaged at random.

Every attack is a function that takes the entries of a valid archive, by name, and the file that it would make.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

Entries = dict[str, bytes]
MODEL = "models/model.json"
DOCUMENT = "extra/fxopt.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


def entries_of(path: Path) -> Entries:
    """Return the entries of an archive by their names within its folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def packed(entries: Mapping[str, bytes], further: list[tuple[str, bytes]] | None = None) -> bytes:
    """Return an archive of these entries, and of further ones whose names may be there already."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in [*entries.items(), *(further or [])]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two entries of one name
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return buffer.getvalue()


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def expression(mark: Path) -> str:
    """Return Python code that makes a file."""
    return f"open({str(mark)!r}, 'w')"


def edited(entries: Entries, name: str, change: Callable[[Any], None]) -> Entries:
    """Return entries of which one, of JSON, was changed."""
    data = json.loads(entries[name])
    change(data)
    return {**entries, name: json.dumps(data).encode()}


def saved(value: object) -> bytes:
    """Return what torch.save writes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def graph(program: Any) -> Any:
    """Return the graph of the JSON of a program."""
    return program["graph_module"]["graph"]


def signature(program: Any) -> Any:
    """Return the signature of the call of a program."""
    return program["graph_module"]["module_call_graph"][0]["signature"]


def renamed(data: Any, old: str, new: str) -> Any:
    """Return JSON in which a text is another one, wherever it is."""
    if isinstance(data, dict):
        return {renamed(key, old, new): renamed(value, old, new) for key, value in data.items()}
    if isinstance(data, list):
        return [renamed(item, old, new) for item in data]
    return new if data == old else data


# -- the zip file


def twice(entries: Entries, mark: Path) -> bytes:
    """A second copy of the sample inputs, which torch's reader takes, is a pickle."""
    return packed(entries, [("data/sample_inputs/model.pt", saved(Touch(mark)))])


def twice_the_program(entries: Entries, mark: Path) -> bytes:
    hostile = edited(entries, MODEL, lambda program: _set_sizes(program, expression(mark)))
    return packed(entries, [(MODEL, hostile[MODEL])])


def other_case(name: str) -> Callable[[Entries, Path], bytes]:
    def attack(entries: Entries, mark: Path) -> bytes:
        return packed({name: pickle.dumps(Touch(mark)), **entries})

    return attack


def sample_inputs(entries: Entries, mark: Path) -> bytes:
    return packed({**entries, "data/sample_inputs/model.pt": saved(((Touch(mark),), {}))})


def older_weights(entries: Entries, mark: Path) -> bytes:
    return packed({**entries, "data/weights/model.pt": saved({"first.weight": Touch(mark)})})


def older_constants(entries: Entries, mark: Path) -> bytes:
    return packed({**entries, "data/constants/model.pt": saved({"c": Touch(mark)})})


def older_format(entries: Entries, mark: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("version", "8.20")
        archive.writestr("serialized_exported_program.json", entries[MODEL])
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", saved(Touch(mark)))
    return buffer.getvalue()


def second_model(entries: Entries, mark: Path) -> bytes:
    """A second program has weights of its own, which torch reads too."""
    config = {"config": {"w": {"path_name": "w", "is_param": True, "use_pickle": True, "tensor_meta": None}}}
    further = {
        "models/other.json": entries[MODEL],
        "data/sample_inputs/other.pt": saved(((Touch(mark),), {})),
        "data/weights/other_weights_config.json": json.dumps(config).encode(),
        "data/constants/other_constants_config.json": entries[CONSTANTS],
        "data/weights/w": saved(Touch(mark)),
    }
    return packed({**entries, **further})


def library(entries: Entries, mark: Path) -> bytes:
    code = f'#include <fstream>\nextern "C" void x() {{ std::ofstream("{mark}"); }}\n'.encode()
    further = {"data/aotinductor/model/model.wrapper.so": b"\x7fELF", "data/aotinductor/model/model.wrapper.cpp": code}
    return packed({**entries, **further})


def pickled_weight(entries: Entries, mark: Path) -> bytes:
    def change(config: Any) -> None:
        next(iter(config["config"].values()))["use_pickle"] = True

    return packed({**edited(entries, WEIGHTS, change), "data/weights/weight_0": saved(Touch(mark))})


def constant(prefix: str, use_pickle: bool, content: Callable[[Path], bytes]) -> Callable[[Entries, Path], bytes]:
    """A constant that torch unpickles by the beginning of its name, whatever `use_pickle` says."""

    def attack(entries: Entries, mark: Path) -> bytes:
        meta = next(iter(json.loads(entries[WEIGHTS])["config"].values()))["tensor_meta"]
        row = {"path_name": f"{prefix}0", "is_param": False, "use_pickle": use_pickle, "tensor_meta": meta}
        hostile = edited(entries, CONSTANTS, lambda config: config["config"].update(c=row))
        return packed({**hostile, f"data/constants/{prefix}0": content(mark)})

    return attack


def path_outside(entries: Entries, mark: Path) -> bytes:
    def change(config: Any) -> None:
        next(iter(config["config"].values()))["path_name"] = "../sample_inputs/model.pt"

    return packed(edited(entries, WEIGHTS, change))


# -- the program


def _set_sizes(program: Any, text: str) -> None:
    for tensor in graph(program)["tensor_values"].values():
        tensor["sizes"][0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}


def _in_sizes(text: Callable[[Path], str]) -> Callable[[Any, Path], None]:
    return lambda program, mark: _set_sizes(program, text(mark))


def _bound_of(program: Any, mark: Path) -> None:
    program["range_constraints"][expression(mark)] = {"min_val": 2, "max_val": 9}


def _guard(program: Any, mark: Path) -> None:
    program["guards_code"] = [f"{expression(mark)} is None"]


def _slow_guard(program: Any, mark: Path) -> None:
    program["guards_code"] = ["10 ** 10 ** 9 > L['x'].size()[0]"]


def _target(name: str, *texts: str) -> Callable[[Any, Path], None]:
    """Let the first node call something, with texts for arguments of which ``MARK`` is the mark."""

    def change(program: Any, mark: Path) -> None:
        node = graph(program)["nodes"][0]
        given = [{"name": "", "arg": {"as_string": text.replace("MARK", str(mark))}, "kind": 1} for text in texts]
        node.update(target=name, inputs=given or node["inputs"])

    return change


def _operator_argument(program: Any, mark: Path) -> None:
    node = graph(program)["nodes"][0]
    node["target"] = "torch.ops.higher_order.wrap_with_set_grad_enabled"
    node["inputs"] = [
        {"name": "", "arg": {"as_bool": True}, "kind": 1},
        {"name": "", "arg": {"as_operator": "torch.os.mkdir"}, "kind": 1},
        {"name": "", "arg": {"as_string": str(mark)}, "kind": 1},
    ]


def _parameter_name(name: str) -> Callable[[Entries, Path], bytes]:
    def attack(entries: Entries, mark: Path) -> bytes:
        new = name.replace("MARK", expression(mark))
        changed = {
            each: json.dumps(renamed(json.loads(entries[each]), "block.2.weight", new)).encode()
            for each in (MODEL, WEIGHTS)
        }
        return packed({key: value for key, value in {**entries, **changed}.items() if key != DOCUMENT})

    return attack


def _name(old: str, new: str) -> Callable[[Entries, Path], bytes]:
    def attack(entries: Entries, mark: Path) -> bytes:
        program = renamed(json.loads(entries[MODEL]), old, new.replace("MARK", expression(mark)))
        return packed({**entries, MODEL: json.dumps(program).encode()})

    return attack


def _forward_names(program: Any, mark: Path) -> None:
    signature(program)["forward_arg_names"] = [f"x={expression(mark)}"]


def _keyword_names(program: Any, mark: Path) -> None:
    spec = json.loads(signature(program)["in_spec"])
    positional, named = spec[1]["children_spec"]
    named["children_spec"], positional["children_spec"] = positional["children_spec"], []
    named["context"] = json.dumps([f"x={expression(mark)}"])
    signature(program)["in_spec"] = json.dumps(spec)


def _spec(kind: str, context: Any) -> Callable[[Any, Path], None]:
    def change(program: Any, mark: Path) -> None:
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        text = (
            json.dumps(context) if not isinstance(context, dict) or "default_factory_module" not in context else context
        )
        spec = {"type": kind, "context": text, "children_spec": [leaf]}
        signature(program)["out_spec"] = json.dumps([1, spec])

    return change


def _deep_spec(program: Any, mark: Path) -> None:
    signature(program)["in_spec"] = "[" * 100_000


def _deep_containers(program: Any, mark: Path) -> None:
    leaf = '{"type": null, "context": null, "children_spec": []}'
    start = '{"type": "builtins.tuple", "context": "null", "children_spec": ['
    signature(program)["in_spec"] = f"[1, {start * 300}{leaf}{']}' * 300}]"


def _verifier(program: Any, mark: Path) -> None:
    program["verifiers"] = ["__import__"]


def _source(program: Any, mark: Path) -> None:
    graph(program)["nodes"][0]["metadata"]["source_fn_stack"] = "x,torch.utils.cpp_extension.load"


def in_program(change: Callable[[Any, Path], None]) -> Callable[[Entries, Path], bytes]:
    """Return the attack that changes the JSON of the program."""
    return lambda entries, mark: packed(edited(entries, MODEL, lambda program: change(program, mark)))


# -- the document


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
    document["checks"]["conditions"] = [[f"{expression(mark)} is None", "x"]]


def _source_form(mark: Path) -> Any:
    return {"source": {"name": f"x), {expression(mark)}, (", "target": "t", "graph_id": 1, "pass_name": "p"}}


def _source_as_type(document: Any, mark: Path) -> None:
    document["graph"]["rows"][0].update(type=_source_form(mark))


def _source_as_argument(document: Any, mark: Path) -> None:
    document["graph"]["rows"][4].update(args=[{"node": 0}, _source_form(mark)])


FUNCTION, METHOD = "call_function", "call_method"
X: dict[str, Any] = {"node": 0}
ATTACKS: dict[str, Callable[[Entries, Path], bytes]] = {
    "an entry twice": twice,
    "the program twice": twice_the_program,
    "model.PT": other_case("data/sample_inputs/model.PT"),
    "Weight_0": other_case("data/weights/Weight_0"),
    "MODEL.json": other_case("models/MODEL.json"),
    "sample inputs": sample_inputs,
    "weights in a pickle": older_weights,
    "constants in a pickle": older_constants,
    "the older format": older_format,
    "a second model": second_model,
    "a library": library,
    "a pickled weight": pickled_weight,
    "an opaque object": constant("opaque_obj_", True, lambda mark: pickle.dumps(Touch(mark))),
    "an opaque object that says it is none": constant("opaque_obj_", False, lambda mark: pickle.dumps(Touch(mark))),
    "an object of TorchScript": constant("custom_obj_", True, lambda mark: saved(Touch(mark))),
    "an object that says it is none": constant("custom_obj_", False, lambda mark: saved(Touch(mark))),
    "a pickled constant": constant("tensor_", True, lambda mark: saved(Touch(mark))),
    "an entry elsewhere": path_outside,
    "code for a size": in_program(_in_sizes(expression)),
    "code within a size": in_program(_in_sizes(lambda mark: f"Add(Integer({expression(mark)}), Integer(1))")),
    "code as a symbol": in_program(_in_sizes(lambda mark: f'Symbol("s0", positive={expression(mark)})')),
    "a lambda for a size": in_program(_in_sizes(lambda mark: f"(lambda: {expression(mark)})()")),
    "an attribute in a size": in_program(_in_sizes(lambda mark: "Integer.__subclasses__()")),
    "a factorial for a size": in_program(_in_sizes(lambda mark: "factorial(10**8)")),
    "a power for a size": in_program(_in_sizes(lambda mark: "Pow(Integer(10), Integer(1000000000))")),
    "a tower for a size": in_program(_in_sizes(lambda mark: "2**2**2**2**2**2")),
    "a deep size": in_program(_in_sizes(lambda mark: "Add(" * 5000 + "1" + ")" * 5000)),
    "many signs": in_program(_in_sizes(lambda mark: "-" * 15_000 + "1")),
    "code for a bound": in_program(_bound_of),
    "code for a guard": in_program(_guard),
    "a guard that takes long": in_program(_slow_guard),
    "a function of Python": in_program(_target("torch.os.mkdir", "MARK")),
    "torch.load": in_program(_target("torch.load", "MARK")),
    "torch.hub.load": in_program(_target("torch.hub.load", "MARK", "x")),
    "a builtin": in_program(_target("torch.builtins.open", "MARK", "w")),
    "a file that is mapped": in_program(_target("torch.ops.aten.from_file.default", "MARK", "x")),
    "a file that is saved": in_program(_target("torch.ops.aten.save.default", "MARK")),
    "a library that is loaded": in_program(_target("torch.ops.load_library", "MARK")),
    "a class of TorchScript": in_program(_target("torch.classes.load_library", "MARK")),
    "an extension": in_program(_target("#x:y", "MARK")),
    "a method caller": in_program(_target("_operator.methodcaller", "MARK")),
    "a call": in_program(_target("_operator.call", "MARK")),
    "a function as argument": in_program(_operator_argument),
    "a parameter that is code": _parameter_name('q", MARK, ".weight'),
    "a parameter that is code in one line": _parameter_name("q'), MARK, ('.weight"),
    "a parameter with a new line": _parameter_name("q\n    MARK\n    .weight"),
    "a parameter that is a method": _parameter_name("to_folder"),
    "an input that is code": _name("x", "x=MARK"),
    "a node that is code": _name("linear", "linear = MARK; y"),
    "names of arguments that are code": in_program(_forward_names),
    "names of inputs that are code": in_program(_keyword_names),
    "an enumeration": in_program(_spec("builtins.dict", [{"__enum__": True, "fqn": "antigravity:A", "name": "x"}])),
    "a defaultdict": in_program(
        _spec(
            "collections.defaultdict",
            {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": ["a"]},
        )
    ),
    "a type that is imported": in_program(_spec("antigravity.Output", ["a"])),
    "a class within a cache": in_program(
        _spec("builtins.dict", [{"_t": "obj", "p": "subprocess:Popen", "s": {"x": 1}}])
    ),
    "a deep structure": in_program(_deep_spec),
    "deep containers": in_program(_deep_containers),
    "a verifier": in_program(_verifier),
    "a source": in_program(_source),
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
    "forward": in_document(_attribute("forward", {"name": "builtins:getattr"})),
    "a compiled call": in_document(_attribute("_compiled_call_impl", {"name": "builtins:getattr"})),
    "a function for an attribute": in_document(_attribute("eps", {"name": "builtins:getattr"})),
    "a list of functions for an attribute": in_document(_attribute("eps", [{"name": "builtins:getattr"}])),
    "extra_repr": in_document(_attribute("extra_repr", {"name": "builtins:str"})),
    "to_folder": in_document(_child("to_folder", "MARK")),
    "to_folder in other letters": in_document(_child("\uff54o_folder", "MARK")),
    "print_readable": in_document(_child("print_readable")),
    "a module that is code": in_document(_child('x"), CODE, ("')),
    "an input of the document": in_document(_input_name),
    "a condition of the document": in_document(_condition),
    "code for a type": in_document(_source_as_type),
    "code for an argument": in_document(_source_as_argument),
    "factorial": in_document(_row(op=FUNCTION, target={"name": "math:factorial"}, args=[10**7])),
}
"""What a stranger may try, by name."""


# -- files that are no archives, or too large ones


def compressed(entries: Entries, size: int) -> bytes:
    """Return an archive whose program is a bomb: zeros, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", b" " * size if name == MODEL else content)
    return buffer.getvalue()


def overlapping(entries: Entries, count: int) -> bytes:
    """Return an archive in which many weights lie in the same place of the file, a mebibyte each."""
    config = json.loads(entries[WEIGHTS])["config"]
    meta = next(iter(config.values()))
    block = bytes(1 << 20)
    for index in range(count):
        config[f"w{index}"] = {**meta, "path_name": f"weight_{1000 + index}"}
    content = packed({**entries, WEIGHTS: json.dumps({"config": config}).encode(), "data/weights/weight_1000": block})
    end = content.rindex(b"PK\x05\x06")
    directory_size, directory = struct.unpack("<II", content[end + 12 : end + 20])
    rows = content[directory : directory + directory_size]
    name = b"archive/data/weights/weight_1000"
    at = rows.index(name) - 46
    row = rows[at : at + 46 + len(name)]
    copies = b"".join(row.replace(name, f"archive/data/weights/weight_{1000 + n}".encode()) for n in range(1, count))
    head = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, *[content[end + 8] + count - 1] * 2, len(rows + copies), directory, 0
    )
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
    texts = [name for name in (MODEL, MODEL, DOCUMENT, DOCUMENT, WEIGHTS, CONSTANTS) if name in entries]
    name = random.choice(texts)
    data = json.loads(entries[name])
    for _ in range(random.randint(1, 3)):
        if data:
            _mutate(data, random)
    return packed({**entries, name: json.dumps(data).encode()})


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 1e308, "", "x", "os.system", "self", "weight_0", "torch.ops.aten.relu.default",
    "Symbol('s0', integer=True)", [], {}, [[]], {"as_int": 3}, {"node": 1}, {"name": "torch:relu"},
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
