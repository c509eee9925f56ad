"""The shape of a Llama-like model: every number that the reference engine needs to run it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and constants of one decoder-only model with grouped-query attention.

    name: what the model is called towards people and over HTTP.
    vocab_size: rows of the embedding; token ids are 0 to vocab_size - 1.
    hidden_size, intermediate_size, layers, heads, kv_heads, head_dim: counts, 1 or more;
        ``heads`` is a multiple of ``kv_heads`` and ``head_dim`` is even.
    rope_theta: base of the rotary embedding, above 0.
    norm_eps: added to the mean square in RMSNorm, above 0.
    max_tokens: context limit, prompt and output together.
    tie_embeddings: whether the output head is the embedding.
    bos_id: token put before a text, or None.
    eos_ids: tokens that end an answer; may be empty.

    Raises ConfigError, naming the field, when a number is out of range.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_tokens: int
    tie_embeddings: bool
    bos_id: int | None
    eos_ids: frozenset[int]

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "max_tokens",
            "rope_theta",
            "norm_eps",
        ):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"model {self.name!r}: {field} is {value}, it must be above 0")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name!r}: heads is {self.heads}, "
                f"it must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model {self.name!r}: head_dim is {self.head_dim}, it must be even")
        special = set(self.eos_ids) | ({self.bos_id} if self.bos_id is not None else set())
        if any(not 0 <= token < self.vocab_size for token in special):
            raise ConfigError(
                f"model {self.name!r}: bos_id {self.bos_id} or eos_ids {sorted(self.eos_ids)} "
                f"lie outside the vocabulary of {self.vocab_size}"
            )
