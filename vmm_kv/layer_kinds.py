"""What each layer of a decoder caches: full attention, a window of it, a state, both, or nothing.

Configs say it in a dozen ways; each rule here names the key it reads. What a key means was read in the configuration
classes of transformers, whose patterns are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle, islice
from typing import Any, Literal

from vmm_kv.config_fields import Fields, MissingKey, whole

Kind = Literal["full", "window", "state", "full + state", "window + state", "none"]

_NAMES: dict[str, Kind] = {
    "full_attention": "full", "attention": "full", "global_attention": "full", "sliding_attention": "window",
    "local_attention": "window", "chunked_attention": "window", "linear_attention": "state", "mamba": "state",
    "mamba2": "state", "recurrent": "state", "conv": "state", "short_conv": "state", "hybrid": "full + state",
    "hybrid_sliding": "window + state", "mlp": "none", "moe": "none",
}  # fmt: skip
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Latent attention with an indexer. An indexer beside heads keeps something else, which is not known here."""
_LETTERS: dict[str, Kind] = {"M": "state", "*": "full", "-": "none", "E": "none"}
_ALL_WINDOW = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"})
"""Model types of which every layer has the window, where the config gives one."""
_WINDOW_BY_DEFAULT = frozenset({"mistral", "ministral"})
"""Of these, those that have one also where the key is left out; `null` means none."""
_OFF_BY_DEFAULT = ("qwen2", "qwen3", "smollm3")
"""What model types begin with that use their window only where `use_sliding_window` says so."""
_ALL_STATE = frozenset({"mamba", "mamba2", "falcon_mamba"})
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6}
"""Every n-th layer is full, the others have the window: what these model types do where the config leaves it out."""
_ENCODERS = frozenset({
    "albert", "beit", "bert", "big_bird", "camembert", "clip", "clip_text_model", "clip_vision_model",
    "convbert", "data2vec-text", "deberta", "deberta-v2", "deit", "dinov2", "distilbert", "electra", "ernie",
    "esm", "eurobert", "flaubert", "fnet", "funnel", "hubert", "ibert", "layoutlm", "layoutlmv2", "layoutlmv3",
    "lilt", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert",
    "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "siglip", "siglip2",
    "siglip2_text_model", "siglip_text_model", "siglip_vision_model", "squeezebert", "swin", "tapas", "vit",
    "wav2vec2", "wavlm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
})  # fmt: skip
"""Model types that are encoders, unless the config says `is_decoder`: they see all of the input at once."""
_OTHER_STATES = frozenset({
    "xlstm", "rwkv", "rwkv5", "rwkv6", "rwkv7", "gla", "gated_deltanet", "delta_net", "retnet", "hgrn2", "gsa",
    "lightning_attn", "mesa_net", "comba", "log_linear_mamba2", "recurrent",
})  # fmt: skip
"""Model types whose layers keep states of a size that is not known here."""
_MOST_LAYERS = 10_000
_OF_STATES = ("mamba_", "ssm_", "linear_num_", "linear_conv_", "linear_attn_", "lru_", "rwkv_")
"""What keys of layers with a state begin with."""
_ALL_FULL = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "phi", "gpt2", "gpt_neox", "gptj", "gpt_bigcode",
    "opt", "bloom", "mpt", "falcon", "stablelm", "olmo", "olmo2", "olmoe", "granite", "granitemoe", "cohere", "glm",
    "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "smollm3", "persimmon", "nemotron", "internlm2",
    "baichuan", "deci", "nemotron-nas", "exaone", "dbrx", "minicpm", "minicpm3", "arctic", "longcat_flash",
} | _ALL_WINDOW)  # fmt: skip
"""Model types of which every layer is full where the config names neither a window nor kinds of layers."""


def layer_kinds(fields: Fields) -> tuple[Kind, ...]:
    """One kind a layer. `MissingKey` where the config does not tell; `ValueError` for a kind that is not known here
    and for what is no decoder."""
    _check_planned(fields)
    named = fields.sequence("layer_types", "layers_block_type")
    if named is not None:
        latent = fields.get("kv_lora_rank") is not None
        return _checked(fields, ["full" if latent and name in _INDEXED else _kind(name) for name in named])
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            raise ValueError(f"hybrid_override_pattern: {''.join(unknown)[:20]!r} is no kind of layer known here")
        return _checked(fields, [_LETTERS[letter] for letter in pattern])
    count = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: {count} layers, at most {_MOST_LAYERS} are planned")
    if (found := _from_positions(fields, count)) is not None:
        return found
    if fields.model_type in _ALL_STATE:
        return _all("state", count)
    if fields.model_type == "falcon_h1":
        return _all("full + state", count)
    if fields.model_type not in _ALL_FULL and any(
        str(name).startswith(_OF_STATES) and value is not None for name, value in fields.values.items()
    ):
        raise MissingKey("layer_types", fields.model_type)  # some layers keep a state, nobody says which
    if (found := _from_sharing(fields, count) or _from_window(fields, count)) is not None:
        return found
    fields.implied("layer_types", fields.model_type in _ALL_FULL, "full attention in every layer is")
    return _all("full", count)


def window_tokens(fields: Fields) -> int:
    """Tokens that a layer with a window keeps of a request."""
    return fields.count("sliding_window", "attention_chunk_size", "attention_window_size", "sliding_window_size")


def _check_planned(fields: Fields) -> None:
    if fields.get("is_encoder_decoder") is True:
        raise ValueError(f"{fields.model_type!r} is an encoder with a decoder: only decoders are planned here")
    masked = [str(name).endswith("ForMaskedLM") for name in fields.sequence("architectures") or ()]
    if fields.get("is_decoder") is not True and (fields.model_type in _ENCODERS or (masked and all(masked))):
        raise ValueError(
            f"{fields.model_type!r} is an encoder, which keeps no KV cache: only decoders are planned here"
        )
    if fields.get("n_recurrent_loops") is not None:
        raise ValueError(f"layers of {fields.model_type!r} run in loops and keep more than once: not planned here")
    if fields.model_type in _OTHER_STATES:
        raise ValueError(f"{fields.model_type!r} keeps states of a size that is not known here")


def _kind(name: Any) -> Kind:
    kind = _NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"layer_types: {str(name)[:50]!r} is no kind of layer whose cache is known here")
    return kind


def _checked(fields: Fields, kinds: list[Kind]) -> tuple[Kind, ...]:
    count = fields.optional_count("num_hidden_layers")
    if not kinds or count not in (None, len(kinds)):
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}")
    return tuple(kinds)


def _from_positions(fields: Fields, count: int) -> tuple[Kind, ...] | None:
    """From keys that say where attention layers stand among layers with a state."""

    def by(full: Callable[[int], bool], otherwise: Kind = "state", chosen: Kind = "full") -> tuple[Kind, ...]:
        return tuple(chosen if full(i) else otherwise for i in range(count))

    if (chosen_layers := fields.sequence("attn_layer_indices", "full_attn_idxs")) is not None:
        return by(chosen_layers.__contains__)
    nested = fields.get("linear_attn_config")
    if isinstance(nested, dict) and isinstance(places := nested.get("full_attn_layers"), list):
        return by(lambda i: i + 1 in places)  # counted from 1
    if (period := fields.optional_count("attn_layer_period")) is not None:
        offset = fields.optional_count("attn_layer_offset", least=0) or 0
        return by(lambda i: i % period == offset)
    if (interval := fields.optional_count("full_attention_interval")) is not None:
        return by(lambda i: (i + 1) % interval == 0)
    if (ones := fields.sequence("attn_type_list")) is not None:
        return _checked(fields, ["full" if one == 1 else "state" for one in ones])
    if (ones := fields.sequence("hybrid_layer_pattern")) is not None:
        return _checked(fields, ["window" if one == 1 else "full" for one in ones])
    if blocks := fields.sequence("block_types"):
        kinds = [_kind(name) for name in blocks]  # Griffin: what it calls attention always has a window
        return tuple("window" if kind == "full" else kind for kind in islice(cycle(kinds), count))
    return None


def _from_sharing(fields: Fields, count: int) -> tuple[Kind, ...] | None:
    """From keys that say which layers read what another one keeps, or what does not grow with the tokens."""
    if (crossing := fields.sequence("cross_attention_layers")) is not None:
        fields.notes.append("layers with cross attention keep what images take, which is not planned")
        return tuple("none" if i in crossing else "full" for i in range(count))
    if fields.get("use_cla") is True:
        factor = fields.count("cla_share_factor")
        return tuple("none" if i % factor else "full" for i in range(count))
    return None


def _from_window(fields: Fields, count: int) -> tuple[Kind, ...] | None:
    """From `sliding_window` and what says which layers have it. `None`: there is no window."""
    if fields.model_type in _WINDOW_BY_DEFAULT and "sliding_window" not in fields.values:
        fields.implied("sliding_window", False, "no window is")
    used = fields.get("use_sliding_window")
    if fields.get("sliding_window") is None or used is False:
        return None
    if used is None and fields.model_type.startswith(_OFF_BY_DEFAULT):
        return None
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and not set(pattern) - set("LG"):
        return _windows(letter == "L" for letter in islice(cycle(pattern), count))
    if pattern is None and fields.model_type in _PERIODS:
        pattern = _PERIODS[fields.model_type]
    if pattern is not None:
        period = whole("sliding_window_pattern", pattern)
        return _windows(bool((i + 1) % period) for i in range(count))
    if (first := fields.optional_count("max_window_layers", least=0)) is not None:
        return _windows(i >= first for i in range(count))
    if fields.model_type not in _ALL_WINDOW:
        fields.implied(
            "layer_types", False, f"full attention in every layer, not a window of {window_tokens(fields)}, is"
        )
        return _all("full", count)
    return _all("window", count)


def _windows(windowed: Iterable[bool]) -> tuple[Kind, ...]:
    kinds: tuple[Kind, Kind] = ("full", "window")
    return tuple(kinds[one] for one in windowed)


def _all(kind: Kind, count: int) -> tuple[Kind, ...]:
    return (kind,) * count
