"""Make configurations of transformers small, by the names of their fields."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Built = TypeVar("Built")

WIDTH, HEADS, HEAD, INNER, VOCABULARY, POSITIONS, EXPERTS, LAYERS = 64, 4, 16, 128, 128, 128, 4, 1
FIRST_SPECIAL = 100
"""Ids of special tokens that do not fit the vocabulary begin here; ordinary tokens are below."""

_LAYERS = re.compile(
    r"(num|n)_.*layers?$|.*_num_layers$|.*_layers$|n_layer|layers|depth|.*_depth|num_layers|.*num_blocks"
)
_NOT_LAYERS = re.compile(
    r"num_feat_extract_layers|.*shared_layers|no_rope_layers|.*residual.*|.*_feature_layers?|.*only.*"
)
_HEADS = re.compile(r".*(num|n)_.*heads?$|.*_heads$|num_heads|n_heads?|mamba_n_heads")
_HEAD = re.compile(r"(.*_)?head_dim|d_kv|d_head|kv_channels|.*_head_size|query_pre_attn_scalar|mamba_d_head")
_INNER = re.compile(
    r".*(intermediate|ffn|feedforward|feed_forward).*(size|dim)?|d_ff|mlp_dim|n_inner|d_inner|.*mlp_hidden.*"
)
_WIDTH = re.compile(
    r".*(hidden|width|channels|units|filters|rank|embd|embed|inplanes).*|.*_(dim|size|dims|sizes)|d_model|dim|dims|.*channel_list"
)
_NOT_WIDTH = re.compile(
    r".*(kernel|window|stride|batch|chunk|vocab|patch|image|img|crop|sample|block|queue|group|ratio|factor|num_channels"
    r"|max_|pos_|position|buckets|token|layer|frame|codebook_size|input_size|feature_sizes|feat_sizes|type_|grid|levels"
    r"|box|pool|scale|num_|label|context_size|cache|bandwidth|tubelet|fft|hop|mel|memory_size|expand).*"
)
_POSITIONS = re.compile(
    r"max_.*position.*|n_positions|max_.*positions|model_max_length|max_seq.*|n_ctx|.*max_seq_len.*"
)
_EXPERTS = re.compile(r"num_experts|n_routed_experts|(moe_)?num_(local_)?experts|num_.*routed_experts|moe_num_experts")
_CHOSEN = re.compile(r".*(experts_per_tok.*|top_?k|moe_k|num_selected_experts|num_expert_activated)")
_TOKEN = re.compile(r".*_token_(id|index)s?|.*_token|.*_id|.*_(ids|index)")


FILLED = {
    "pad_token_id": 0,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "prediction_length": 8,
    "context_length": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": INNER,
    "top_k_experts": 2,
    "num_experts": EXPERTS,
    "vocabulary_map": {"<image>": FIRST_SPECIAL, "<|extra_200|>": FIRST_SPECIAL + 1},
    "backbone": "resnet18",
    "attn_layer_indices": [0],
    "image_token_index": FIRST_SPECIAL,
    "image_token_id": FIRST_SPECIAL,
    "video_token_index": FIRST_SPECIAL + 1,
    "video_token_id": FIRST_SPECIAL + 1,
    "default_language": "en_XX",
}
"""Values of fields for which some models do not take None."""


_SUPPLIED = {"rope_theta": 10000.0, "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS}
"""Values of fields that some configurations lack; a rate of dropout is 0."""


def small(
    kind: Callable[[], Any],
    build: Callable[[Any], Built],
    fields: Mapping[str, Any] | None = None,
    *,
    seconds: float = 30,
) -> Built:
    """Return what is built from the first small configuration that works, or raise the first error.

    `fields` are set in each configuration; the names of those of its parts have dots.
    """
    failures: list[Exception] = []
    end = time.process_time() + seconds
    for make in _SMALL:
        supplied: set[tuple[str, str]] = set()
        for _ in range(4):
            if time.process_time() > end:
                break
            try:
                config = make(kind)
                for name, value in (fields or {}).items():
                    set_field(config, name, value)
                for place in supplied:
                    _supply(config, *place)
                if is_wide(config):
                    break
                return build(config)
            except Exception as error:  # whatever the model raises
                failures.append(error)
                missing = _missing(error.__cause__ or error)
                if missing is None or missing in supplied:
                    break
                supplied.add(missing)
    raise failures[0]


def set_field(config: Any, name: str, value: Any) -> None:
    """Set a field of a configuration, or of a part of it by a name with dots."""
    *parts, last = name.split(".")
    for part in parts:
        config = getattr(config, part)
    vars(config)[last] = value


def _missing(error: BaseException) -> tuple[str, str] | None:
    """Return the class of a configuration and the field that an error misses in it."""
    found = re.search(r"'(\w+Config)' object has no attribute '(\w+)'", str(error))
    return (found[1], found[2]) if found else None


def _supply(config: Any, cls: str, name: str) -> None:
    """Set a field of the parts of a class, as another part has it."""
    parts = nested(config)
    value = next((vars(part)[name] for part in parts if name in vars(part)), None)
    if value is None:
        value = 0.0 if "drop" in name else _SUPPLIED.get(name)
    for part in parts:
        if type(part).__name__ == cls:
            vars(part)[name] = value


def _with_sections(config: Any) -> Any:
    add_sections(config)
    return config


_SMALL: tuple[Callable[[Callable[[], Any]], Any], ...] = (
    lambda kind: shrink(kind()),
    lambda kind: _with_sections(fill(shrink(kind()))),
    lambda kind: rebuilt(shrink(kind())),
    lambda kind: _with_sections(fill(shrink(kind(), width=False))),
    lambda kind: fill(rebuilt(shrink(kind(), layers=4))),
    lambda kind: fill(shrink(kind(), layers=4)),
    lambda kind: fill(rebuilt(shrink(kind(), width=False, layers=4))),
    lambda kind: fill(kind()),
)
"""Small configurations, each for models that do not take those before; the last are wide and deep."""


class Chosen(list[int]):
    """The indices of the layers that are kept."""

    def __init__(self, kept: Sequence[int], of: int) -> None:
        super().__init__(kept)
        self.of = of


def shrink(config: Any, *, width: bool = True, layers: int = LAYERS) -> Any:
    """Make a configuration small in place, with all it contains; without `width`, only layers, positions and words."""
    tokens: dict[str, int] = {}
    for each in nested(config):
        _shrink_one(each, tokens, width=width, layers=layers)
    return config


def rebuilt(config: Any) -> Any:
    """Return a configuration made from the fields of a small one, so that derived fields fit.

    Numbers without a default are left to the constructor, as are attributes that are not fields.
    """
    default = type(config)()
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = vars(config).get(field.name)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            arguments[field.name] = rebuilt(value)
        elif value != vars(default).get(field.name) and (field.default is not None or isinstance(value, list)):
            arguments[field.name] = value
    return type(config)(**arguments)


def fill(config: Any) -> Any:
    """Give fields that a model cannot do without values in place of None, by their names, in all parts."""
    for each in nested(config):
        for name, value in vars(each).items():
            if value is None and name in FILLED:
                vars(each)[name] = FILLED[name]
    return config


def nested(config: Any) -> list[Any]:
    """Return a configuration and all that it contains."""
    found = [config]
    for value in vars(config).values():
        values = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        for each in values:
            if hasattr(each, "to_dict") and hasattr(each, "model_type"):
                found += nested(each)
    return found


def _shrink_one(config: Any, tokens: dict[str, int], *, width: bool, layers: int) -> None:
    fields = {name: value for name, value in vars(config).items() if name not in ("id2label", "label2id")}
    chosen = _chosen_layers(fields, layers)
    for name, value in fields.items():
        new = _new_value(name, value, chosen, tokens, width=width)
        if new is not value and new != value:
            vars(config)[name] = new
    for name, value in fields.items():  # some take as many heads of keys as of queries only
        if name.endswith("num_key_value_heads") and width:
            queries = name.replace("key_value", "attention")
            if value is not None and value == fields.get(queries):
                vars(config)[name] = vars(config)[queries]
    if isinstance(stages := fields.get("stage_names"), list) and len(vars(config).get("_out_indices") or []):
        _set_stages(config, stages, chosen)


def _new_value(name: str, value: Any, chosen: Chosen, tokens: dict[str, int], *, width: bool) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, dict):
        return _rope(value) if "rope" in name and width else value
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return type(value)(_new_numbers(name, value, chosen, tokens, width=width))
    if name == "backbone_feature_sizes" and value and width:
        factor = 9 if value[0][0] % 9 == 0 else 16  # as `image_size` makes the images smaller
        return [[side // factor for side in sides] for sides in value]
    if isinstance(value, list | tuple) and _is_per_layer(value, chosen):
        return type(value)(value[index] for index in chosen)
    return _new_number(name, value, chosen, tokens, width=width) if isinstance(value, int) else value


def _new_number(name: str, value: int, chosen: Chosen, tokens: dict[str, int], *, width: bool) -> int:
    if _TOKEN.fullmatch(name) and not name.endswith(("layer_id", "model_id")):
        if value < FIRST_SPECIAL:
            return value
        return tokens.setdefault(name.replace("_index", "_id"), FIRST_SPECIAL + len(tokens))
    if "vocab" in name and ("size" in name or name.endswith("_vocab")):
        return min(value, VOCABULARY)
    if _POSITIONS.fullmatch(name):
        return min(value, POSITIONS)
    if _EXPERTS.fullmatch(name):
        return min(value, EXPERTS)
    if _CHOSEN.fullmatch(name):
        return min(value, 2)
    if name in ("n_group", "topk_group", "num_expert_group", "num_expert_groups"):
        return 1
    if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return min(value, 1)
    if re.fullmatch(r".*(layer_period|_period|_pattern|_interval|every_n_layers)", name):
        return min(value, 2)
    if name.endswith("sparse_step"):
        return min(value, 1)
    if name.endswith("layer_offset"):
        return min(value, 1)
    if _LAYERS.fullmatch(name) and not _NOT_LAYERS.fullmatch(name):
        main = name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
        return min(value, len(chosen) if main and chosen else LAYERS)
    if name in ("num_frames", "frames_per_clip"):
        return min(value, 8)
    if name in ("num_queries", "num_query_tokens", "num_denoising", "two_stage_num_proposals"):
        return min(value, 8)
    if not width:
        return value
    if name == "num_pos_feats":
        return min(value, WIDTH // 2)
    if re.fullmatch(r".*image_size|img_size|.*_resolution", name):
        return image_size(value)
    if _HEADS.fullmatch(name):
        return min(value, 2) if "key_value" in name or "kv" in name or value < HEADS else HEADS
    if _HEAD.fullmatch(name):
        return min(value, 2 * HEAD if name == "qk_head_dim" else HEAD)
    if _INNER.fullmatch(name):
        return min(value, INNER)
    if name.endswith("_groups") or (_WIDTH.fullmatch(name) and not _NOT_WIDTH.fullmatch(name)):
        return min(value, WIDTH)
    return value


def image_size(value: int) -> int:
    """Return a size of images that the usual patches and strides divide."""
    return min(value, 112 if value % 14 == 0 and value % 32 else 64)


def _new_numbers(name: str, values: Sequence[int], chosen: Chosen, tokens: dict[str, int], *, width: bool) -> list[int]:
    if name in (
        "depth",
        "depths",
        "layers",
        "num_blocks",
        "stage_num_blocks",
        "blocks",
        "layer_depths",
        "stage_blocks",
        "blocks_per_stage",
    ):
        return [min(value, 1) for value in values]
    if re.fullmatch(r".*(visual_indexes|att_block_indexes|attn_indexes)", name):
        return [0] if name != "deepstack_visual_indexes" else list(range(min(len(values), LAYERS)))
    if _is_per_layer(values, chosen):
        values = [values[index] for index in chosen]
    if width and _WIDTH.fullmatch(name) and not _NOT_WIDTH.fullmatch(name) and max(values) > WIDTH:
        scale = WIDTH / max(values)
        return [max(8, round(value * scale / 8) * 8) if value > 4 else value for value in values]
    if width and _HEADS.fullmatch(name):
        return [min(value, 2) for value in values]
    return [_new_number(name, value, chosen, tokens, width=width) for value in values]


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Scale the sections of multi-axis rotary embeddings to the size of a head."""
    made = {key: _rope(each) if isinstance(each, dict) else each for key, each in value.items()}
    if isinstance(section := made.get("mrope_section"), list | tuple):
        factor: Any = made.get("partial_rotary_factor", 1)
        half = int(HEAD * factor) // 2
        scaled = [max(1, half * each // max(1, sum(section))) for each in section]
        made["mrope_section"] = [half - sum(scaled[1:]), *scaled[1:]]
    return made


def add_sections(config: Any) -> None:
    """Add the sections of multi-axis rotary embeddings, which defaults of some configurations leave out."""
    for each in nested(config):
        if isinstance(rope := vars(each).get("rope_parameters"), dict):
            half = int(HEAD * float(rope.get("partial_rotary_factor", 1))) // 2
            rope.setdefault("mrope_section", [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8])


def is_wide(config: Any) -> bool:
    """Whether the widths of a configuration make a model too large for this."""
    names = ("hidden_size", "d_model", "n_embd", "intermediate_size", "embed_dim")
    sizes = [vars(each).get(name) for each in nested(config) for name in names]
    return max((size for size in sizes if isinstance(size, int)), default=0) > 4096


def _layer_count(fields: dict[str, Any]) -> int:
    names = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _chosen_layers(fields: dict[str, Any], layers: int) -> Chosen:
    """Return the layers to keep: one of each kind that lists with an entry for each layer tell apart."""
    count = _layer_count(fields)
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == count]
    kinds = [{(place, value[index]) for place, value in enumerate(lists) if isinstance(value[index], str | int)}
             for index in range(count)]  # fmt: skip
    least = min(count, max(layers, len(fields.get("_out_indices") or [])))
    chosen: list[int] = []
    while len(chosen) < 2 and count:  # those with the most new kinds
        seen = set().union(*(kinds[index] for index in chosen))
        best = max(range(count), key=lambda index: (len(kinds[index] - seen), -index))
        if chosen and not kinds[best] - seen:
            break
        chosen.append(best)
    more = [index for index in range(count) if index not in chosen][: max(0, least - len(chosen))]
    return Chosen(sorted({*chosen, *more}), count)


def _is_per_layer(values: Sequence[Any], chosen: Chosen) -> bool:
    """Whether a list has an entry for each of the layers, of which `chosen` are kept."""
    return len(chosen) < len(values) == chosen.of and len(values) > 5 and not hasattr(values[0], "to_dict")


def _set_stages(config: Any, stages: list[str], chosen: Chosen) -> None:
    """Keep the names of stages, and those of outputs, of a backbone whose stages are its layers."""
    if len(stages) <= 6 or not chosen:
        return
    kept = stages[: len(chosen) + 1]
    count = min(len(config._out_indices), len(kept) - 1)
    fields = vars(config)
    fields["stage_names"], fields["_out_features"] = kept, kept[-count:]
    fields["_out_indices"] = list(range(len(kept) - count, len(kept)))
