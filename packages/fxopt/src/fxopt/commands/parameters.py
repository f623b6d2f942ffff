"""Arguments and options that several commands take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

SOURCE_HELP = "A .fxopt archive, a folder in Hugging Face format, owner/name on the Hub, or package.module:factory."

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
ArchiveArgument = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="A .fxopt archive, as written by `fxopt optimize`.")
]
PipelineOption = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        "-p",
        metavar="PIPELINE",
        help="Passes separated by commas, with options in braces, or a named pipeline: see `fxopt list`. By default "
        "cpu-inference for models on a CPU, inference for others.",
    ),
]
OutputOption = Annotated[str, typer.Option("--output", "-o", metavar="OUT", help="The .fxopt archive to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="Inputs of the model: a file written by torch.save, or safetensors. By default those that come with "
        "SOURCE, or random ones of the right sizes.",
    ),
]
RtolOption = Annotated[
    float | None, typer.Option("--rtol", min=0.0, help="Relative tolerance, instead of the default for the dtype.")
]
AtolOption = Annotated[
    float | None, typer.Option("--atol", min=0.0, help="Absolute tolerance, instead of the default for the dtype.")
]
SqnrOption = Annotated[
    float | None,
    typer.Option("--sqnr", min=0.0, help="Least signal-to-noise ratio in dB, instead of tolerances and promises."),
]
PickleOption = Annotated[
    bool,
    typer.Option(
        "--trusted",
        help="Open pickles in the file of inputs. A pickle runs whatever code its author put into it: only for files "
        "that you trust like a program.",
    ),
]
DynamicOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic",
        metavar="NAME=DIMS",
        help="Dimensions of an input that vary, such as pixel_values=0,2,3; once for each input, and all others are "
        "fixed. By default the first, and for text the second too.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@dataclass(frozen=True)
class Job:
    """What a command is asked to do, option by option; the last four are those of `fxopt optimize`."""

    source: str
    pipeline: str | None
    inputs: str | None
    run_pickled_code: bool
    dynamic: Mapping[str, Sequence[int]] = field(default_factory=dict)
    verify: bool = True
    strict: bool = False
    expect: int | None = None
    bounds: Mapping[str, Any] = field(default_factory=dict)
