"""From a model's config.json: the bytes that each of its KV groups takes for a token, a block and a request.

    attention   2 x kv heads on this rank x head size x bytes of a number, for each layer (K and V may differ in size)
    latent      (kv_lora_rank + qk_rope_head_dim) x bytes of a number: one vector for all heads, so each rank keeps all
    window      as attention, but a request keeps at most the window
    state       a fixed size for each request

Plain data and plain ints: no torch, no device. `read` is the way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmm_kv.config_fields import Fields, MissingKey, decoder_fields, filled, read_config, whole
from vmm_kv.kv_dtype import KvDtype, kv_dtype, number_bytes
from vmm_kv.kv_groups import GroupKind
from vmm_kv.layer_kinds import Kind, layer_kinds, window_tokens
from vmm_kv.state_shape import State, split_or_replicate, state_of

_HIDDEN_OVER_HEADS = frozenset({
    "llama", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "phi", "phi3", "phimoe", "gpt2", "gpt_neox",
    "gptj", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "stablelm", "starcoder2", "olmo", "olmo2", "olmoe",
    "granite", "granitemoe", "granitemoehybrid", "cohere", "cohere2", "bamba", "jamba", "falcon_h1", "lfm2",
    "recurrent_gemma", "minimax", "persimmon", "internlm2", "baichuan", "deci", "nemotron-nas", "exaone", "dbrx",
    "minicpm", "smollm3",
})  # fmt: skip
"""Model types whose heads share the hidden size where `head_dim` is left out. Others have a default of their own."""
_AS_MANY_KV_HEADS = frozenset({
    "llama", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "mpt", "baichuan", "olmo",
    "olmo2", "olmoe", "cohere", "cohere2", "persimmon", "granite", "granitemoe", "falcon",
    "gpt_bigcode", "deci", "nemotron-nas", "dbrx", "minicpm",
})  # fmt: skip
"""Model types that are multi-head where `num_key_value_heads` is left out."""
_LATENT = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_linear", "longcat_flash", "minicpm3",
    "glm4_moe_lite", "glm_moe_dsa", "mistral4", "youtu",
})  # fmt: skip
"""Model types with latent attention also where `kv_lora_rank` is left out."""
_INDEX_TILE, _INDEX_SCALE = 128, 4
"""A sparse-attention indexer keeps its keys in 8 bits: numbers that share a scale, bytes of that scale."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


@dataclass(frozen=True)
class Attention:
    """Keys and values of one layer, by heads."""

    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    def key_bytes(self, dtype: KvDtype, tp: int) -> int:
        return split_or_replicate("KV heads", self.kv_heads, tp) * dtype.vector_bytes(self.key_size)

    def token_bytes(self, dtype: KvDtype, tp: int) -> int:
        """On one of `tp` ranks."""
        if dtype.packed_latent:
            raise ValueError(f"{dtype.name} packs latent attention; this model has heads")
        if dtype.slot is not None:
            return dtype.slot
        heads = split_or_replicate("KV heads", self.kv_heads, tp)
        return self.key_bytes(dtype, tp) + heads * dtype.vector_bytes(self.value_size)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one vector a token, and where attention is sparse the indexer's key."""

    rank: int
    rope: int
    index: int = 0
    window: int | None = None

    def token_bytes(self, dtype: KvDtype, tp: int) -> int:
        """On every rank the same: there are no heads to split."""
        index = self.index + -(-self.index // _INDEX_TILE) * _INDEX_SCALE
        return (dtype.latent_bytes(self.rank, self.rope) if dtype.slot is None else dtype.slot) + index


@dataclass(frozen=True)
class Layer:
    """What one layer of the decoder caches; nothing, where all is `None`."""

    attention: Attention | Latent | None = None
    state: State | None = None


@dataclass(frozen=True)
class KvGroup:
    """Layers that cache alike, on one rank. Bytes; those for a token are of all its layers together."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    bytes_per_token: int = 0
    key_bytes_per_token: int = 0
    """The keys' part; 0 where keys and values are not kept apart."""
    layer_bytes: tuple[int, ...] = ()
    """Of each of `layers` for a token; none for a state."""
    bytes_per_request: int = 0
    """Fixed: states."""
    window: int | None = None

    def bytes_per_block(self, block_size: int) -> int:
        """A block of `block_size` tokens."""
        return self.bytes_per_token * block_size

    def tokens_kept(self, tokens: int) -> int:
        """Of a request of so many tokens: at most the window, and never more than the request has (case C63)."""
        return tokens if self.window is None else min(tokens, self.window)

    def request_bytes(self, tokens: int) -> int:
        """What a request of so many tokens keeps: a fixed part and one that grows (case C58)."""
        return self.bytes_per_request + self.bytes_per_token * self.tokens_kept(tokens)


def _together(alike: Sequence[KvGroup]) -> KvGroup:
    return replace(
        alike[0],
        layers=tuple(index for one in alike for index in one.layers),
        bytes_per_token=sum(one.bytes_per_token for one in alike),
        key_bytes_per_token=sum(one.key_bytes_per_token for one in alike),
        layer_bytes=tuple(size for one in alike for size in one.layer_bytes),
        bytes_per_request=sum(one.bytes_per_request for one in alike),
    )


@dataclass(frozen=True)
class ModelShape:
    """A decoder's layers, as its config describes them."""

    model_type: str
    layers: tuple[Layer, ...]
    dtype: str
    """What the model computes in."""
    recurrent_dtype: str
    """What recurrent states are kept in."""
    max_tokens: int | None
    """The longest request of which the config knows."""
    heads: int | None
    notes: tuple[str, ...] = ()

    def groups(
        self,
        *,
        kv: str = "auto",
        tp: int = 1,
        layers: Sequence[int] | None = None,
        recurrent: str = "auto",
    ) -> tuple[KvGroup, ...]:
        """The groups on one of `tp` ranks that holds `layers` (all of them by default), in the order of first layers.

        `kv` and `recurrent` name what the cache and the recurrent states are kept in, `"auto"`: as the model. A slot
        such as `"584B"` is what one token takes in one layer on one rank. `ValueError` for an unknown name and where
        `tp` does not divide.
        """
        whole("tensor parallel", tp)
        if self.heads is not None and self.heads % tp:
            raise ValueError(f"tensor parallel {tp} does not divide the {self.heads} attention heads")
        dtype = kv_dtype(self.dtype if kv == "auto" else kv)
        state_item = number_bytes(self.recurrent_dtype if recurrent == "auto" else recurrent)
        chosen = range(len(self.layers)) if layers is None else layers
        groups: dict[str, list[KvGroup]] = {}
        for index in chosen:
            for part in (self.layers[index].attention, self.layers[index].state):
                if part is not None:
                    one = self._alone(part, index, dtype, state_item, tp)
                    groups.setdefault(one.name, []).append(one)
        return tuple(_together(alike) for alike in groups.values())

    def _alone(self, part: Attention | Latent | State, index: int, dtype: KvDtype, state_item: int, tp: int) -> KvGroup:
        """The group of one layer."""
        if isinstance(part, State):
            item = 4 if part.float32 else state_item
            fixed = part.conv_numbers(tp) * number_bytes(self.dtype) + part.recurrent_numbers(tp) * item
            return KvGroup("state", "state", (index,), bytes_per_request=fixed)
        token = part.token_bytes(dtype, tp)
        keys = 0 if dtype.slot is not None or isinstance(part, Latent) else part.key_bytes(dtype, tp)
        kind: GroupKind = "full" if part.window is None else "window"
        reach = "full" if part.window is None else f"window {part.window}"
        name = f"latent {reach}".removesuffix(" full") if isinstance(part, Latent) else reach
        return KvGroup(name, kind, (index,), token, keys, (token,), window=part.window)


def read(path: str | Path, *, dtype: str | None = None) -> ModelShape:
    """The shape of the model that a config.json, or the folder it is in, describes. `dtype` replaces its own.

    Where the JSON leaves keys to its model type's defaults, transformers is asked, if it is installed. `ValueError`
    that names the key if one is still missing or makes no sense, `OSError` if there is no file.
    """
    values = read_config(path)
    try:
        return from_values(values, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_values(values: dict[str, Any], *, dtype: str | None = None) -> ModelShape:
    """The same from the decoded object."""
    try:
        return shape_of(decoder_fields(values), dtype)
    except MissingKey as missing:
        try:
            defaults, why = filled(values)
        except ValueError as wrong:
            raise ValueError(f"{missing}; {wrong}") from missing
        own = decoder_fields(values)
        # The outer config's dtype stays: the class of a nested one does not know it. So does what is said to be null.
        fields = own if defaults is None else decoder_fields({**own.values, **_there(defaults), **_there(own.values)})
        fields.assume = True
        try:
            shape = shape_of(fields, dtype)
        except MissingKey as still:
            raise ValueError(f"{still}; {why}" if why else str(still)) from missing
    if defaults is not None:
        return shape
    return replace(shape, notes=(*shape.notes, why))


def shape_of(fields: Fields, dtype: str | None = None) -> ModelShape:
    """The shape that these fields describe, nothing else asked. `MissingKey` where they do not."""
    kinds = layer_kinds(fields)
    shared = fields.optional_count("num_kv_shared_layers", least=0) or 0
    kept = [kind if i < len(kinds) - shared else "none" for i, kind in enumerate(kinds)]
    layers = tuple(_layer(fields, index, kind) for index, kind in enumerate(kept))
    if fields.model_type == "longcat_flash" and fields.get("num_hidden_layers") is None:
        layers = tuple(layer for layer in layers for _ in range(2))  # each has two attentions
    dtype = _dtype(fields) if dtype is None else dtype
    own = fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    recurrent = own if isinstance(own, str) and own != "auto" else dtype
    number_bytes(dtype), number_bytes(recurrent)  # a wrong name is an error even where no layer has a state
    _note_quantised(fields)
    return ModelShape(
        model_type=fields.model_type,
        layers=layers,
        dtype=dtype,
        recurrent_dtype=recurrent,
        max_tokens=fields.optional_count(
            "max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "seq_length"
        ),
        heads=fields.optional_count(*_HEADS) if any(layer.attention for layer in layers) else None,
        notes=tuple(fields.notes),
    )


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Which layers each of `stages` pipeline stages holds. `ValueError` for more stages than layers.

    What does not divide goes to the stages before the last, from the back: the last has the output head (vLLM's rule).
    """
    whole("pipeline parallel", stages)
    if stages > layers:
        raise ValueError(f"pipeline parallel {stages}: the model has only {layers} layers")
    counts = [layers // stages] * stages
    for i in range(layers % stages):
        counts[-2 - i] += 1
    starts = [sum(counts[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _there(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _layer(fields: Fields, index: int, kind: Kind | str) -> Layer:
    if kind == "none":
        return Layer()
    attention = None if kind == "state" else _attention(fields, index, windowed=kind.startswith("window"))
    return Layer(attention, state_of(fields) if kind.endswith("state") else None)


def _attention(fields: Fields, index: int, *, windowed: bool) -> Attention | Latent | None:
    fields = _for_layer(fields, index, windowed)
    latent = fields.get("use_mla") is not False
    if latent and fields.model_type in _LATENT and "kv_lora_rank" not in fields.values:
        raise MissingKey("kv_lora_rank", fields.model_type)
    if latent and (rank := fields.optional_count("kv_lora_rank")) is not None:
        return _latent(fields, rank, index, windowed)
    heads = _kv_heads(fields, index)
    if heads == 0:
        return None
    if (queries := fields.count(*_HEADS)) % heads:
        raise ValueError(f"{heads} key-value heads do not divide the {queries} attention heads")
    size = _head_size(fields)
    value = fields.optional_count("v_head_dim", least=0) or size
    return Attention(heads, size, value, window_tokens(fields) if windowed else None)


def _latent(fields: Fields, rank: int, index: int, windowed: bool) -> Latent:
    rope = fields.optional_count("qk_rope_head_dim", least=0)
    if rope is None:
        raise MissingKey("qk_rope_head_dim", fields.model_type)
    indexers = fields.sequence("indexer_types")
    has_index = not windowed and (indexers is None or indexers[index : index + 1] == ["full"])
    own_index = fields.optional_count("index_head_dim") if has_index else None
    return Latent(rank, rope, own_index or 0, window_tokens(fields) if windowed else None)


def _for_layer(fields: Fields, index: int, windowed: bool) -> Fields:
    """The fields with what is said of this layer alone, or of layers with a window alone, in the place of the rest."""
    own: dict[str, Any] = {}
    per_layer = fields.get("per_layer_config")
    if isinstance(per_layer, dict):
        named = {str(name).lstrip("0") or "0": said for name, said in per_layer.items()}  # "05", "5" or 5
        said = named.get(str(index)) or {}
        if not isinstance(said, dict):
            raise ValueError(f"per_layer_config of layer {index} must be an object, got {said!r}")
        own = {**said}
    elif not windowed and fields.get("global_head_dim") is not None:
        own["head_dim"] = fields.get("global_head_dim")
        if fields.get("attention_k_eq_v") is True:
            own["num_key_value_heads"] = fields.get("num_global_key_value_heads", "num_key_value_heads")
    elif windowed:
        names = ("num_key_value_heads", "head_dim", "v_head_dim", "num_attention_heads")
        own = {name: fields.get(f"swa_{name}") for name in names if fields.get(f"swa_{name}") is not None}
        if fields.model_type == "mimo_v2_flash" and "num_key_value_heads" not in own:
            own["num_key_value_heads"] = 2 * fields.count("num_key_value_heads")  # as its class has it
    return Fields({**fields.values, **own}, fields.model_type, fields.assume, fields.notes) if own else fields


def _kv_heads(fields: Fields, index: int) -> int:
    """KV heads of that layer; 0 where its attention was left out."""
    heads = fields.count(*_HEADS)
    if (blocks := fields.sequence("block_configs")) is not None:
        return _heads_of_block(blocks, index, heads)
    names = ("num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "n_head_kv")
    one = fields.get("multi_query")
    if (fields.model_type == "falcon" if one is None else one is True) and fields.get(
        "new_decoder_architecture"
    ) is not True:
        return 1
    if fields.get("multi_query_attention") is True:
        return fields.count("multi_query_group_num")
    given = fields.get(*names)
    if given is None and isinstance(nested := fields.get("attn_config"), dict):
        given = nested.get("kv_n_heads")
    if isinstance(given, list):
        if index >= len(given):
            raise ValueError(f"num_key_value_heads names {len(given)} layers, there is a layer {index}")
        given = given[index]
    if given is None:
        fields.implied(
            "num_key_value_heads", fields.model_type in _AS_MANY_KV_HEADS, f"as many as attention heads, {heads}, are"
        )
        return heads
    return whole("num_key_value_heads", given)


def _heads_of_block(blocks: list[Any], index: int, heads: int) -> int:
    """From a searched architecture's `block_configs`: query heads that share a KV head, or no attention."""
    block = blocks[index] if index < len(blocks) and isinstance(blocks[index], dict) else {}
    attention = block.get("attention")
    if not isinstance(attention, dict):
        raise ValueError(f"block_configs: layer {index} says nothing of its attention")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    return heads // whole("n_heads_in_group", attention.get("n_heads_in_group"))


def _head_size(fields: Fields) -> int:
    given = fields.optional_count("head_dim", "attention_head_dim", "kv_channels", "head_size")
    if given is not None:
        return given
    hidden, heads = fields.count("hidden_size", "n_embd", "d_model"), fields.count(*_HEADS)
    if hidden % heads:
        raise MissingKey("head_dim", fields.model_type)
    what = f"hidden_size / num_attention_heads, {hidden // heads}, is"
    known = fields.model_type in _HIDDEN_OVER_HEADS or fields.get("use_mla") is False
    fields.implied("head_dim", known, what)
    return hidden // heads


def _dtype(fields: Fields) -> str:
    given = fields.get("dtype", "torch_dtype")
    if given is None:
        fields.notes.append("dtype is not in the config: bfloat16 assumed")
        return "bfloat16"
    if not isinstance(given, str):
        raise ValueError(f"dtype: a name is expected, not {str(given)[:50]}")
    return given.removeprefix("torch.")


def _note_quantised(fields: Fields) -> None:
    quantised = fields.get("quantization_config")
    if isinstance(quantised, dict) and (quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")):
        fields.notes.append("the checkpoint has scales for a quantised KV cache: name its dtype to plan with it")
