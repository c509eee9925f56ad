"""Small model files that tests write: a safetensors folder and a GGUF file of the same model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ.", "he", "th"]
MERGES = ["h e", "t h"]
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 8, 2


def config_json(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by their safetensors names, of values that half precision holds exactly."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.integers(-64, 65, shape) / 64).astype(np.float32)

    out = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN)}
    for index in range(LAYERS):
        layer = {
            "input_layernorm": draw(HIDDEN),
            "self_attn.q_proj": draw(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": draw(HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": draw(HIDDEN),
            "mlp.gate_proj": draw(INNER, HIDDEN),
            "mlp.up_proj": draw(INNER, HIDDEN),
            "mlp.down_proj": draw(HIDDEN, INNER),
        }
        out |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    out |= {"model.norm.weight": draw(HIDDEN), "lm_head.weight": draw(len(TOKENS), HIDDEN)}
    return out


def encoded(array: np.ndarray, kind: str) -> bytes:
    if kind == "BF16":
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2", "I32": "<i4"}[kind]).tobytes()


def write_safetensors(path: Path, values: dict[str, np.ndarray], kind: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in values.items():
        raw = encoded(array, kind)
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_folder(folder: Path, *, kind: str = "F32", **changes: Any) -> Path:
    """A complete model folder with its weights in two files."""
    values = tensors()
    names = list(values)
    for index, part in enumerate((names[::2], names[1::2])):
        write_safetensors(
            folder / f"model-{index}.safetensors", {name: values[name] for name in part}, kind
        )
    (folder / "config.json").write_text(json.dumps(config_json(**changes)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "hi"})
    )
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return folder


def tokenizer_json() -> str:
    import tokenizers

    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(TOKENS)},
            merges=[tuple(merge.split()) for merge in MERGES],
        )
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    text: str = inner.to_str()
    return text


def gguf_value(value: Any) -> bytes:
    """Type number and bytes of one metadata value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    items = [gguf_value(item) for item in value]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(
    path: Path, metadata: dict[str, Any], arrays: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> Path:
    """arrays: name to (type number, shape with rows first, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(metadata))
    for key, value in metadata.items():
        out += gguf_string(key) + gguf_value(value)
    body = b""
    for name, (kind, shape, raw) in arrays.items():
        body += b"\0" * (-len(body) % 32)
        out += gguf_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", kind, len(body))
        body += raw
    path.write_bytes(out + b"\0" * (-len(out) % 32) + body)
    return path


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_arrays() -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """The same weights under GGUF's names, queries and keys in GGUF's row order."""
    out = {}
    for name, value in tensors().items():
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            part = _GGUF_NAMES[rest.removesuffix(".weight")]
            if part in ("attn_q", "attn_k"):
                heads = len(value) // HEAD_DIM
                halves = value.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
                value = halves.swapaxes(1, 2).reshape(value.shape)
            target = f"blk.{index}.{part}.weight"
        else:
            target = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        out[target] = (0, value.shape, encoded(value, "F32"))
    return out
