"""`fxopt export SOURCE`: a model or an archive as a program of torch.export, or as ONNX, compared with onnxruntime."""

from __future__ import annotations

import re
import tempfile
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_sources
from fxopt.commands.failures import CommandError, ExitCode, FileError, blaming
from fxopt.commands.parameters import ForceOption, InputsOption, JsonOption, PickleOption, SeedOption, SourceArgument
from fxopt.commands.terminal import Terminal, bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from fxopt_tools import Inputs

_RTOL, _ATOL = 1e-3, 1e-4  # onnxruntime computes in other orders
ProgramOption = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="The .pt2 file to write, which torch.export.load reads."),
]
OnnxOption = Annotated[str | None, typer.Option("--onnx", metavar="FILE", help="The .onnx file to write.")]


def export(
    source: SourceArgument,
    output: ProgramOption = None,
    onnx: OnnxOption = None,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model or an archive for torch alone, or as ONNX.

    Sizes that vary in the graph vary in the file, which has no history. Where onnxruntime is installed, it runs the
    ONNX file, which is kept only if the outputs agree.
    """

    def work(terminal: Terminal) -> Answer:
        check_sources(source, inputs=inputs, trusted=run_pickled_code)
        target = onnx or output
        if target is None or (onnx and output):
            raise CommandError("give the file to write: -o model.pt2 or --onnx model.onnx", ExitCode.USAGE)
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if onnx and missing:
            raise FileError(f"writing ONNX needs {' and '.join(missing)}: pip install onnx onnxscript")
        from fxopt.commands.outputs import check_output

        path = check_output(target, force=force, suffix=".onnx" if onnx else ".pt2")
        with terminal.steps(5) as step:
            from fxopt.commands.models.inputs import inputs_for
            from fxopt.commands.models.sources import graph_of, read_source

            step("reading")
            model = read_source(source, run_pickled_code=run_pickled_code)
            calls = inputs_for(model, inputs, seed, run_pickled_code=run_pickled_code)
            step("capturing")
            graph_module = graph_of(model, calls[0])
            step("exporting")
            write = _write_onnx if onnx else _write_program
            data = write(graph_module, calls[0], path)
        return Answer(data, lambda terminal: _show(terminal, data))

    answer(work, as_json=as_json)


def _program(graph_module: GraphModule, inputs: Inputs) -> ExportedProgram:
    from fxopt.commands.outputs import knows_its_inputs
    from fxopt_capture import export as export_program

    with blaming(ExitCode.CAPTURE):
        return export_program(graph_module, *() if knows_its_inputs(graph_module) else (inputs.args, inputs.kwargs))


def _write_program(graph_module: GraphModule, inputs: Inputs, path: Path) -> dict[str, Any]:
    import torch

    program = _program(graph_module, inputs)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.absolute().parent) as folder:
        try:
            torch.export.save(program, Path(folder, path.name))
        except Exception as error:  # whatever torch cannot serialize
            reason = str(error).partition("\n")[0]
            raise CommandError(
                f"torch.export.save cannot write the program: {type(error).__name__}: {reason}", ExitCode.CAPTURE
            ) from error
        Path(folder, path.name).replace(path)
    outputs = [str(spec.arg.name) for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    return {"output": str(path), "bytes": path.stat().st_size, "outputs": outputs, "max_absolute_error": None}


def _write_onnx(graph_module: GraphModule, inputs: Inputs, path: Path) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    with torch.inference_mode(), blaming(ExitCode.FILE):
        leaves = pytree.tree_leaves_with_path(graph_module(*inputs.args, **inputs.kwargs))
    expected = {_name(key): leaf for key, leaf in leaves if isinstance(leaf, torch.Tensor)}
    program = _program(graph_module, inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            made: Any = torch.onnx.export(program, (), dynamo=True, verbose=False, output_names=list(expected))
    except Exception as error:  # torch.onnx raises errors of many kinds
        reason = str(error).partition("\n")[0]
        raise CommandError(
            f"torch.onnx.export cannot export the graph: {type(error).__name__}: {reason}. A pass may have put "
            "operators into it that ONNX lacks: try the archive of `fxopt optimize -p inference`",
            ExitCode.CAPTURE,
        ) from error
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.absolute().parent) as folder:
        file = Path(folder, path.name)
        made.save(file)
        found = _ran(file, graph_module, inputs)
        difference = None if found is None else _error(found, list(expected.values()))
        for each in sorted(Path(folder).iterdir(), reverse=True):  # weights beyond 2 GB have a file of their own
            each.replace(path.with_name(each.name))
    return {
        "output": str(path),
        "bytes": path.stat().st_size,
        "outputs": list(expected),
        "max_absolute_error": difference,
    }


def _name(path: Any) -> str:
    """Return a name for an output from its place in what the model returns."""
    from torch.utils import _pytree as pytree

    return "_".join(re.findall(r"\w+", pytree.keystr(path))) or "output"


def _ran(path: Path, graph_module: GraphModule, inputs: Inputs) -> list[torch.Tensor] | None:
    """Return what onnxruntime computes; None where it is not installed, or has no tensors of a dtype."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = [
        leaf for leaf in pytree.tree_leaves((inputs.args, dict(inputs.kwargs))) if isinstance(leaf, torch.Tensor)
    ]
    dtypes = {tensor.dtype for tensor in (*tensors, *graph_module.parameters())}
    if find_spec("onnxruntime") is None or torch.bfloat16 in dtypes:
        return None
    session = import_module("onnxruntime").InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    values = {name: tensor.cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(found) for found in session.run(None, values)]


def _error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference.

    Raises:
        CommandError: It is larger than allowed.
    """
    import torch

    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.allclose(one, other.cpu(), rtol=_RTOL, atol=_ATOL):
            raise CommandError(
                f"output {place} of the ONNX file differs in onnxruntime by up to {_distance(one, other):.3g}, more "
                f"than rtol {_RTOL} and atol {_ATOL} allow; nothing was written",
                ExitCode.DIFFERS,
            )
    return max(map(_distance, found, expected), default=0.0)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.cpu().double()).abs().max()) if one.numel() else 0.0


def _show(terminal: Terminal, data: dict[str, Any]) -> None:

    error = data["max_absolute_error"]
    if data["output"].endswith(".pt2"):
        terminal.print(f"{data['output']} ({bytes_text(data['bytes'])}): torch.export.load reads it")
        return
    checked = (
        "not verified: onnxruntime is not installed, or lacks the dtype"
        if error is None
        else (f"passed: onnxruntime differs by at most {error:.3g}")
    )
    terminal.print(f"{data['output']} ({bytes_text(data['bytes'])}): {', '.join(data['outputs'])}")
    terminal.print(checked)
