"""What a layer with a recurrent state keeps of a request: a fixed size, however long the request is.

Two parts: the last inputs of a short convolution (kernel size - 1 columns), and the recurrent state itself. Sizes are
numbers, not bytes; each family names the keys it reads. Over tensor parallel both are split by heads; groups that are
fewer than the ranks are kept by each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vmm_kv.config_fields import Fields, MissingKey, whole


@dataclass(frozen=True)
class State:
    """Numbers that one layer keeps of one request."""

    conv_split: int
    """Columns of the convolution that tensor parallel splits."""
    conv_groups: int = 0
    """Groups of columns that it splits only down to one."""
    group_columns: int = 0
    """Columns of one such group."""
    conv_kept: int = 0
    """Inputs of each column that are kept."""
    recurrent: int = 0
    heads: int = 1
    """Heads of the recurrent state: tensor parallel must divide them."""
    float32: bool = False
    """The recurrent state is kept in float32 whatever the model computes in."""

    def conv_numbers(self, tp: int) -> int:
        """On one of `tp` ranks. `ValueError` where that does not divide."""
        groups = split_or_replicate("groups of the state-space layers", self.conv_groups, tp) if self.conv_groups else 0
        return (self.conv_split // self._divisor(tp) + groups * self.group_columns) * self.conv_kept

    def recurrent_numbers(self, tp: int) -> int:
        return self.recurrent // self._divisor(tp)

    def _divisor(self, tp: int) -> int:
        if self.heads % tp:
            raise ValueError(f"tensor parallel {tp} does not divide the {self.heads} heads of the state-space layers")
        return tp


def split_or_replicate(what: str, count: int, tp: int) -> int:
    """Of `count` heads or groups those of one of `tp` ranks: an equal share, or one that several ranks keep a copy of.

    `ValueError` where neither divides the other.
    """
    if count % tp == 0:
        return count // tp
    if tp % count == 0:
        return 1
    raise ValueError(f"tensor parallel {tp} and {count} {what}: neither divides the other")


def state_of(fields: Fields) -> State:
    """The state of a layer of this model. `MissingKey` or `ValueError` where no family's keys are there."""
    families: tuple[tuple[str, Callable[[Fields], State]], ...] = (
        ("linear_num_value_heads", _gated_delta),
        ("linear_num_heads", _delta_attention),
        ("linear_attn_config", _delta_attention),
        ("conv_L_cache", _short_conv),
        ("lru_width", _gated_lru),
        ("conv1d_width", _gated_lru),
        ("mamba_n_groups", _mamba2),
        ("mamba_ngroups", _mamba2),
        ("n_groups", _mamba2),
        ("mamba_d_state", _mamba1),
        ("state_size", _mamba1),
    )
    for key, family in families:
        if fields.get(key) is not None:
            return family(fields)
    if fields.model_type == "minimax" or fields.get("attn_type_list") is not None:
        return _lightning(fields)
    if fields.assume:
        raise ValueError(
            f"model type {fields.model_type!r} has layers with a state, but no keys of one known here: "
            f"{', '.join(key for key, _ in families)}"
        )
    raise MissingKey("mamba_d_state", fields.model_type)


def _mamba2(fields: Fields) -> State:
    """Columns of the convolution: the inner size, and B and C of each group. State: heads x head size x state size."""
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = fields.count("mamba_d_state", "ssm_state_size", "state_size")
    head_size = fields.get("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if head_size is None and fields.model_type == "mamba2":
        head_size = fields.count("head_dim")
    if head_size not in (None, "auto"):
        inner = heads * whole("mamba_d_head", head_size)
    elif (inner := fields.optional_count("mamba_d_ssm") or _inner(fields)) % heads:
        raise ValueError(f"mamba_n_heads: {heads} does not divide the inner size {inner}")
    groups = fields.count("mamba_n_groups", "mamba_ngroups", "n_groups")
    return State(inner, groups, 2 * size, _kept(fields), inner * size, heads)


def _mamba1(fields: Fields) -> State:
    """Columns: the inner size. State: inner size x state size. Split column by column."""
    own = fields.model_type in ("mamba", "falcon_mamba")  # whose `expand` need not say the same
    inner = (fields.optional_count("intermediate_size") if own else None) or _inner(fields)
    return State(
        inner, conv_kept=_kept(fields), recurrent=inner * fields.count("mamba_d_state", "state_size"), heads=inner
    )


def _gated_delta(fields: Fields) -> State:
    """Gated delta rule: queries, keys of the key heads, values of the value heads; state: key x value size a head."""
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key, value = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    return State(
        conv_split=value_heads * value,
        conv_groups=key_heads,
        group_columns=2 * key,
        conv_kept=fields.count("linear_conv_kernel_dim") - 1,
        recurrent=value_heads * key * value,
        heads=value_heads,
    )


def _delta_attention(fields: Fields) -> State:
    """Queries, keys and values of as many heads, each through a convolution; state: head size squared a head, float32
    whatever is asked for (vLLM's `kda_state_dtype`)."""
    nested = fields.get("linear_attn_config")
    if isinstance(nested, dict):
        fields = Fields(nested, fields.model_type)
    heads, size = fields.count("linear_num_heads", "num_heads"), fields.count("linear_head_dim", "head_dim")
    kept = fields.count("linear_conv_kernel_dim", "short_conv_kernel_size") - 1
    return State(3 * heads * size, conv_kept=kept, recurrent=heads * size * size, heads=heads, float32=True)


def _short_conv(fields: Fields) -> State:
    """Only a convolution over the hidden size."""
    hidden = fields.count("conv_dim", "hidden_size")
    return State(hidden, conv_kept=fields.count("conv_L_cache") - 1, heads=hidden)


def _gated_lru(fields: Fields) -> State:
    """Gated linear recurrent unit: one number a column, kept in float32."""
    width = fields.count("lru_width", "hidden_size")
    return State(width, conv_kept=fields.count("conv1d_width") - 1, recurrent=width, heads=width, float32=True)


def _lightning(fields: Fields) -> State:
    """Linear attention without a convolution: head size squared a head."""
    heads = fields.count("num_attention_heads")
    size = fields.optional_count("head_dim") or fields.count("hidden_size") // heads
    return State(0, recurrent=heads * size * size, heads=heads)


def _inner(fields: Fields) -> int:
    expand = fields.get("mamba_expand", "expand")
    if expand is None:
        raise MissingKey("mamba_expand", fields.model_type)
    if not isinstance(expand, int | float) or isinstance(expand, bool) or not 0 < expand <= 64:
        raise ValueError(f"mamba_expand: a number above 0 is expected, not {str(expand)[:50]}")
    return int(expand * fields.count("hidden_size"))


def _kept(fields: Fields) -> int:
    return fields.count("mamba_d_conv", "conv_kernel", "d_conv") - 1
