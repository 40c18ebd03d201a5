"""`devicebridge lora`: LoRA files inspected, and the tools of checkpoints/lora_tools.py."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.telling import say

if TYPE_CHECKING:
    from ..checkpoints.lora_tools import LoraFile, Result

_LARGEST = 5  # changes that are shown
_LAYOUTS, _DTYPES = ("original", "diffusers", "both", "kohya"), ("bfloat16", "float16", "float32")
_TOOLS = {
    "inspect": "show model, kind, ranks, norms, and what loaders make of a file",
    "convert": "write a file in another layout",
    "scale": "multiply a file's strength",
    "merge": "add up several files, each times a weight",
    "extract": "make a LoRA of what a model is more than another",
    "resize": "cut a file to a lower rank",
}


def add_lora_tools(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="TOOL")
    for name, help_text in _TOOLS.items():
        command = commands.add_parser(name, help=help_text)
        command.set_defaults(command=run, tool=name)
        add = command.add_argument
        if name == "extract":
            add("tuned", type=Path, help="the model that was trained, in bf16, fp16 or fp32")
            add("base", type=Path, help="the model that it was trained from, under the same names")
        elif name == "merge":
            add("files", nargs="+", metavar="FILE[:WEIGHT]", help="LoRA files; the weight is 1 if left out")
        else:
            add("file", type=Path, help="LoRA file (.safetensors)")
        if name == "inspect":
            add("--layers", action="store_true", help="show every layer")
            add("--json", action="store_true", help="print as JSON")
            add("--model", type=Path, help="have ComfyUI's loader map the file onto this model's file")
            add("--python", type=Path, help="the Python that runs ComfyUI; found by itself otherwise")
            continue
        if name == "convert":
            add("--to", required=True, choices=_LAYOUTS, help="as output.lora_layout, and kohya's names")
            add("--family", default="", help="flux1, flux2 or wan, where a file does not tell")
        if name == "scale":
            add("--by", type=float, required=True, metavar="NUMBER", help="what strength is multiplied by")
        if name in ("merge", "resize", "extract"):
            add("--rank", type=_rank, default=0, required=name == "extract", help="the rank that is kept")
        if name in ("merge", "resize"):
            add("--base", type=Path, help="the model's file: DoRA and OFT change by its weights")
        if name == "resize":
            add("--energy", type=_share, default=1.0, help="share of the squared norm to be kept, 0 to 1")
        add("-o", "--output", type=Path, required=True, metavar="FILE", help="a file that is not there yet")
        add("--dtype", choices=_DTYPES, help="number type; the file's own if left out, of extract bfloat16")


def _rank(text: str) -> int:
    if (rank := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no rank; give 1 or more")
    return rank


def _share(text: str) -> float:
    if not 0 < (share := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; give a number above 0, up to 1")
    return share


def run(options: argparse.Namespace) -> int:
    """One tool on its files. Raises: ValueError naming the file and what is wrong with it."""
    from ..checkpoints import lora_convert
    from ..checkpoints import lora_tools as tools
    from ..checkpoints.lora_change import open_base

    if getattr(options, "model", None):
        from .native import need_comfyui

        need_comfyui("--model asks ComfyUI's own loader", options.arguments, options.python)
    with ExitStack() as stack:
        if options.tool == "inspect":
            facts = collect(file := stack.enter_context(tools.open_lora(options.file)))
            if options.model:
                from ..checkpoints.lora_start import is_text_layer
                from ..nodes.host.native.source import read_native

                host = read_native(options.model, "bfloat16").family.host
                assert host is not None
                tensors = file.reader.all_tensors()
                facts["unread"] = host.unread_lora({n: each for n, each in tensors.items() if not is_text_layer(n)})
            say(json.dumps(facts, indent=2) if options.json else report(facts, show_all=options.layers))
            return 0
        tools.refuse_place(options.output)
        dtype = tools.DTYPES.get(options.dtype)
        if options.tool == "extract":
            made = tools.extract(options.tuned, options.base, options.rank, dtype or tools.DTYPES["bfloat16"])
        elif options.tool == "convert":
            file = stack.enter_context(tools.open_lora(options.file))
            made = lora_convert.convert(file, options.to, options.family, dtype)
        else:
            if options.tool == "resize" and not options.rank and options.energy == 1:
                raise ValueError(f"{options.file} is resized to --rank, --energy or both; give one")
            by = getattr(options, "by", 1.0)
            weighted = _weighted(options.files) if options.tool == "merge" else [(options.file, by)]
            files = [(stack.enter_context(tools.open_lora(path)), weight) for path, weight in weighted]
            base = stack.enter_context(open_base(getattr(options, "base", None)))
            asked = tools.Combined(getattr(options, "rank", 0), getattr(options, "energy", 1.0), dtype, base)
            made = tools.combine(files, asked)
        tools.write(made, options.output)
    say(_summary(made, options.output))
    return 0


def _weighted(texts: Sequence[str]) -> list[tuple[Path, float]]:
    """Files and weights of texts FILE:WEIGHT. A colon that no number follows is part of a name."""
    found = []
    for text in texts:
        path, colon, weight = text.rpartition(":")
        try:
            found.append((Path(path), float(weight)) if colon and not Path(text).is_file() else (Path(text), 1.0))
        except ValueError:
            found.append((Path(text), 1.0))
    return found


def _summary(made: Result, output: Path) -> str:
    from ..checkpoints.model_files import first

    ranks = sorted(filter(None, made.ranks.values()))
    lines = [f"{output}: {made.did}"]
    if ranks:
        lines.append(f"{len(ranks)} layers of rank {_span(ranks)}")
    if made.energy[0]:
        lines.append(f"{made.energy[1] / made.energy[0]:.1%} of the squared norm of layers that were cut is kept")
    if made.left_out:
        lines.append(f"left out, for they are no layers of the model: {first(made.left_out)}")
    return "\n".join(lines)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def collect(file: LoraFile) -> dict[str, Any]:
    """What is known of a file; of its layers, as describe_layer."""
    from ..checkpoints import lora_convert

    layers = []
    for layer in file.names:
        layers.append({"name": layer, **lora_convert.describe_layer(file, layer)})
        file.reader.release()
    models = lora_convert.find_models(file)
    return {
        "file": str(file.path),
        "models": {model.family.title: list(model.variants) for model in models},
        "loaders": {model.family.title: lora_convert.describe_loaders(file, model) for model in models},
        "layers": layers,
        "metadata": dict(file.reader.header.metadata),
    }


def report(facts: dict[str, Any], *, show_all: bool = False) -> str:
    """The facts as lines: the file, ranks and strengths, models and loaders, the largest changes, metadata."""
    layers = facts["layers"]
    counts = {key: Counter(each[key] for each in layers) for key in ("kind", "type")}
    kinds, types = (", ".join(f"{count} {what}" for what, count in of.items()) for of in counts.values())
    lines = [f"{facts['file']}: layers: {kinds} ({types})"]
    for key in ("rank", "alpha", "strength"):
        if values := [each[key] for each in layers if each[key] is not None]:
            lines.append(f"{key} {_span(values)}" + (f" ({len(values)} layers)" if len(values) < len(layers) else ""))
    for title, variants in facts["models"].items():
        lines.append(f"model: {title}, " + (f"sizes of {', '.join(variants)}" if variants else "of no published size"))
        lines += [f"  {loader} {what}" for loader, what in facts["loaders"][title].items()]
    if not facts["models"]:
        said = facts["metadata"].get("ss_base_model_version") or facts["metadata"].get("modelspec.architecture")
        lines.append(f"model: no family of known names; metadata say {said or 'nothing'}")
    if "unread" in facts:
        unread = facts["unread"]
        such = f", such as {unread[0]}" if unread else ""
        lines.append(f"ComfyUI's loader maps all but {len(unread)} tensors{such}")
    shown = layers if show_all else sorted(layers, key=lambda each: -each["norm"])[:_LARGEST]
    lines.append("changes, as norms" if show_all else f"the {len(shown)} largest changes, as norms")
    for each in shown:
        rank = "" if each["rank"] is None else f", rank {each['rank']}, strength {each['strength']:.4g}"
        lines.append(f"  {each['norm']:.4g}  {each['name']} {each['size'][0]} by {each['size'][1]}{rank}")
    lines += [f"metadata {key}: {value[:100]!r}" for key, value in sorted(facts["metadata"].items())]
    return "\n".join(lines)
