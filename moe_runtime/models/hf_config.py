"""Reading a transformers config: what all families share, and refusals that name key, value and what is supported."""

import math
from collections.abc import Iterable

from moe_runtime.errors import ConfigError
from moe_runtime.models.family import HfConfig
from moe_runtime.models.spec import LayerSpec, ModelSpec, RopeSpec

# dynamic and longrope choose frequencies by the length of the sequence, so keys already in the cache would go stale.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refuse(key: str, value: object, supported: str) -> ConfigError:
    """The error for a config value that cannot be served."""
    return ConfigError(f"config.json: {key} is {value!r}: supported is {supported}")


def base_spec(config: HfConfig, layers: Iterable[LayerSpec]) -> ModelSpec:
    """The spec of everything that all families spell alike; a family replaces what is its own.

    Raises ConfigError for another activation than silu, and for sizes that do not divide.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise refuse("hidden_act", config.hidden_act, "'silu'")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise refuse("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    head_dim = head_dim_of(config)
    rope, reach = rope_of(config, head_dim)
    return ModelSpec(
        family=config.model_type,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max(config.max_position_embeddings, reach),
        layers=tuple(layers),
        rope=rope,
        norm_eps=config.rms_norm_eps,
        attention_scale=head_dim**-0.5,
        tied_embeddings=bool(config.tie_word_embeddings),
        eos_ids=token_ids(config.eos_token_id),
    )


def head_dim_of(config: HfConfig) -> int:
    """`head_dim`, or the hidden size shared out over the heads; written back, since YaRN's formula wants it set."""
    given, heads = getattr(config, "head_dim", None), config.num_attention_heads
    if given is None and config.hidden_size % heads:
        raise refuse("hidden_size", config.hidden_size, f"a multiple of num_attention_heads {heads}")
    config.head_dim = given or config.hidden_size // heads
    if config.head_dim % 2:
        raise refuse("head_dim", config.head_dim, "an even number")
    return config.head_dim


def rope_of(config: HfConfig, head_dim: int) -> tuple[RopeSpec, int]:
    """The rotary embedding by transformers' own formulas, and the context that YaRN stretches it to (else 0)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") not in ROPE_TYPES:
        raise refuse("rope_parameters.rope_type", rope.get("rope_type"), ", ".join(ROPE_TYPES))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor", rope["partial_rotary_factor"], "1.0 (whole heads)")
    if rope.get("mrope_section") is not None:
        raise refuse("rope_parameters.mrope_section", rope["mrope_section"], "text models only (no such key)")
    if rope["rope_type"] == "default":
        return RopeSpec(_default_inv_freq(rope["rope_theta"], head_dim)), 0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)
    reach = rope["factor"] * rope["original_max_position_embeddings"] if rope["rope_type"] == "yarn" else 0
    return RopeSpec(tuple(inv_freq.tolist()), float(scale)), int(reach)


def _default_inv_freq(theta: float, head_dim: int) -> tuple[float, ...]:
    import torch

    # In float32 as transformers computes it, so that angles agree to the last bit.
    return tuple((1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))).tolist())


def window_of(config: HfConfig, key: str = "sliding_window") -> int | None:
    """The sliding window in tokens, the token itself included, exactly as transformers masks it (k > q - window)."""
    window = getattr(config, key, None)
    if window is not None and window < 1:
        raise refuse(key, window, "null or at least 1")
    return window


def refuse_window(config: HfConfig) -> None:
    """For families whose model code has no sliding window."""
    if getattr(config, "sliding_window", None) is not None:
        raise refuse("sliding_window", config.sliding_window, f"null, for {config.model_type}")


def routed_experts(config: HfConfig, key: str) -> int:
    """The number of routed experts under `key`, checked against num_experts_per_tok."""
    experts, top_k = getattr(config, key), config.num_experts_per_tok
    if not experts or experts < 1:
        raise refuse(key, experts, "at least 1")
    if not top_k or not 1 <= top_k <= experts:
        raise refuse("num_experts_per_tok", top_k, f"1 to {key} {experts}")
    return experts


def multiplier(config: HfConfig, key: str) -> float:
    """A finite scale, not zero."""
    value = getattr(config, key)
    if value is None or not math.isfinite(value) or value == 0:
        raise refuse(key, value, "a finite number other than 0")
    return float(value)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
