"""Text to token ids and back, and the chat template.

``Tokenizer`` is what the engine needs. ``ByteTokenizer`` belongs to the built-in model and needs
no package; ``PairTokenizer`` wraps the ``tokenizers`` package for real models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvferry.errors import ConfigError, UsageError

_INSTALL = "pip install 'kvferry[reference]'"
_REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 64


class Tokenizer(Protocol):
    """Text to ids and back for one model."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; those from ``encode`` are below it."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text. Names of special tokens inside the text become those tokens.

        add_special: put the model's own first token in front, where it has one. Pass False for
            what ``chat_prompt`` returned, because templates write that token themselves.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens. Bytes that are no UTF-8 become U+FFFD."""

    def chat_prompt(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for a conversation, up to where the assistant's answer begins.

        messages: dicts with ``role`` and ``content`` strings, oldest first.
        Raises UsageError when a message is malformed or the model has no chat template.
        """


class StreamDecoder:
    """Text of a growing token sequence, piece by piece.

    The pieces joined are ``tokenizer.decode`` of the whole sequence. A character whose bytes
    are spread over tokens comes out when its last byte is there. After ``_HELD_TOKENS_MAX``
    tokens without a clean end, which only malformed output has, the rest is let go as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain, perhaps ""."""
        self._held.append(token_id)
        text = self._held_text()
        # Only the last character can still change, and only when it stands for cut-off bytes.
        is_open = text.endswith(_REPLACEMENT) and len(self._held) < _HELD_TOKENS_MAX
        certain = text[self._shown : len(text) - is_open]
        self._shown = len(text) - is_open
        if not is_open:
            self._settle()
        return certain

    def flush(self) -> str:
        """Return what was held back, and be ready for another sequence's continuation."""
        rest = self._held_text()[self._shown :]
        self._settle()
        return rest

    def _held_text(self) -> str:
        # Some decoders treat the first token of a text differently, so there is always the one
        # before it in front.
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _settle(self) -> None:
        self._context = self._held[-1:] or self._context
        self._held = []
        self._shown = 0


class ByteTokenizer:
    """One token per UTF-8 byte, then four special tokens. Needs no package."""

    special = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
    bos_id = 256
    eos_ids = frozenset({257, 259})
    vocab_size = 260

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = [self.bos_id] if add_special else []
        rest = text
        while rest:
            found = [(rest.find(name), name) for name in self.special if name in rest]
            at, name = min(found, default=(len(rest), ""))
            # Lone surrogates cannot be encoded; they become question marks.
            ids += rest[:at].encode("utf-8", errors="replace")
            if name:
                ids.append(256 + self.special.index(name))
            rest = rest[at + len(name) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def chat_prompt(self, messages: list[dict[str, Any]]) -> str:
        _check_messages(messages)
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n"


class PairTokenizer:
    """A byte-pair tokenizer of a real model, run by the ``tokenizers`` package.

    inner: a ``tokenizers.Tokenizer``.
    template: Jinja text of the chat template, or "". It comes out of a model file, so it runs
        in a sandbox that can neither reach attributes of Python nor change its input.
    first_id: token that ``encode`` puts in front itself, or None where ``inner`` does.
    names: texts of special tokens that templates use, such as ``bos_token``.
    """

    def __init__(
        self,
        inner: Any,
        *,
        eos_ids: frozenset[int],
        template: str = "",
        first_id: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner
        self._template = template
        self._first_id = first_id
        self._names = dict(names or {})
        self.eos_ids = eos_ids
        self.vocab_size = int(inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special).ids
        if add_special and self._first_id is not None:
            return [self._first_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def chat_prompt(self, messages: list[dict[str, Any]]) -> str:
        _check_messages(messages)
        if not self._template:
            raise UsageError("this model has no chat template; send a plain prompt")
        jinja2, sandbox = _jinja()
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self._template)
            text: str = template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UsageError(f"the model's chat template failed: {error}") from error
        return text


def from_gguf(metadata: Mapping[str, Any], eos_ids: frozenset[int]) -> PairTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises ConfigError, naming the key, when the file asks for a kind that is not supported, or
    when the ``tokenizers`` package is missing.
    """
    tokenizers = _tokenizers()
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level pairs) is supported"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = _pre_tokenizer(tokenizers, metadata.get("tokenizer.ggml.pre", ""))
    inner.decoder = tokenizers.decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    _add_special(tokenizers, inner, tokens, types)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_id = metadata.get("tokenizer.ggml.eos_token_id")
    return PairTokenizer(
        inner,
        eos_ids=eos_ids,
        template=metadata.get("tokenizer.chat_template", ""),
        first_id=bos_id if metadata.get("tokenizer.ggml.add_bos_token", False) else None,
        names={
            name: tokens[token]
            for name, token in (("bos_token", bos_id), ("eos_token", eos_id))
            if token is not None
        },
    )


def from_file(
    path: Path, eos_ids: frozenset[int], *, template: str, names: Mapping[str, str]
) -> PairTokenizer:
    """Read a ``tokenizer.json``. Raises ConfigError when it cannot be read."""
    tokenizers = _tokenizers()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception for a bad file
        raise ConfigError(f"the tokenizer {path} is not valid: {error}") from error
    return PairTokenizer(inner, eos_ids=eos_ids, template=template, names=names)


_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_SPLIT_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_PLAIN = frozenset({"", "default", "gpt-2"})


def _pre_tokenizer(tokenizers: Any, name: str) -> Any:
    """How text is cut before pairs are merged: words, and for some models single digits."""
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _PLAIN:
        return words
    if name in _SPLIT_DIGITS:
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        return tokenizers.pre_tokenizers.Sequence([digits, words])
    known = sorted(_SPLIT_DIGITS | _PLAIN - {""})
    raise ConfigError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(known)}")


def _add_special(tokenizers: Any, inner: Any, tokens: Sequence[str], types: Iterable[int]) -> None:
    control, user_defined = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == _GGUF_CONTROL:
            control.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _GGUF_USER_DEFINED:
            user_defined.append(tokenizers.AddedToken(token, special=False, normalized=False))
    inner.add_special_tokens(control)
    inner.add_tokens(user_defined)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise UsageError("messages is empty; a conversation needs at least one")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(f"messages[{index}].{key} must be a string")


def _refuse(reason: str) -> None:
    raise UsageError(f"the model's chat template refused: {reason}")


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "this model needs the package 'tokenizers'; the model 'tiny' needs none", fix=_INSTALL
        ) from error
    return tokenizers


def _jinja() -> tuple[Any, Any]:
    try:
        import jinja2
        from jinja2 import sandbox
    except ImportError as error:
        raise ConfigError(
            "chat templates need the package 'jinja2'; the model 'tiny' needs none", fix=_INSTALL
        ) from error
    return jinja2, sandbox
