"""Tokenizers, text, and batches of token ids.

A tokenizer converts text to ids and back without loss. `Batches` draws windows from a long sequence of ids and returns
(x, y), where y is x shifted by one token. No other part of the package shifts.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha.arguments import as_ids, check_count
from tinygrad_mha.files import CheckpointError, read_json, replacing, write_json
from tinygrad_mha.files.json_files import to_plain
from tinygrad_mha.files.reading import read_file

__all__ = ["BPETokenizer", "Batches", "CharTokenizer", "StreamDecoder", "Tokenizer"]
__all__ += [
    "builtin_corpus",
    "load_tokenizer",
    "name_token",
    "read_text",
    "restore_generator",
    "show_token",
    "split_text",
    "split_words",
]

CJK = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"  # kana, ideographs, punctuation

# --------------------------------------------------------------------------------------------------------------------
# Tokenizers


class Tokenizer:
    """The base of all tokenizers: text to ids, ids to bytes, bytes to text.

    Attributes:
        vocab_size: ids are 0 ... vocab_size - 1.
    """

    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text: int64, shape (T,)."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact UTF-8 bytes of a row of ids. They may begin or end inside a character."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a row of ids; an incomplete character becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer into a folder, from which `load_tokenizer` reads it."""
        raise NotImplementedError

    def _check_ids(self, ids: Iterable[int]) -> list[int]:
        """One row of ids in the vocabulary, as a list."""
        row = as_ids(ids if isinstance(ids, np.ndarray) else list(ids), "ids")
        if row.ndim != 1:
            raise ValueError(f"decode takes one row of ids, got shape {row.shape}: decode the rows one by one")
        wrong = np.flatnonzero((row < 0) | (row >= self.vocab_size))
        if wrong.size:
            i = int(wrong[0])
            raise ValueError(f"the id {row[i]} at position {i} is not in the vocabulary of {self.vocab_size} tokens")
        return row.tolist()


class CharTokenizer(Tokenizer):
    """One id per character, in the order of `characters`.

    Args:
        characters: the vocabulary; each character once.

    Example:
        >>> tokenizer = CharTokenizer.of("hello")
        >>> tokenizer.characters
        'ehlo'
        >>> tokenizer.encode("hole")
        array([1, 3, 2, 0])
    """

    FILE = "characters.json"

    def __init__(self, characters: str) -> None:
        _check_text(characters)
        self._ids = {c: i for i, c in enumerate(characters)}
        if not characters or len(self._ids) < len(characters):
            twice = sorted(c for c, n in Counter(characters).items() if n > 1)
            wrong = f"{twice} more than once" if twice else "no characters"
            raise ValueError(f"a vocabulary has each character once and at least one, got {wrong}")
        self.characters = characters
        self.vocab_size = len(characters)

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """A tokenizer of the characters that occur in a text, sorted by code point."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text.

        Raises:
            ValueError: a character is not in the vocabulary; the message gives it, its position and the vocabulary.
        """
        _check_text(text)
        try:
            return np.array([self._ids[c] for c in text], np.int64)
        except KeyError:
            i, c = next((i, c) for i, c in enumerate(text) if c not in self._ids)
            raise ValueError(
                f"the character {c!r} (U+{ord(c):04X}) at position {i} is not in the vocabulary of "
                f"{self.vocab_size} characters, {self.characters!r}. Remove such characters, or use a tokenizer that "
                "has them; a trained model needs its own tokenizer"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.characters[i] for i in self._check_ids(ids)])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode("utf-8", "surrogatepass")

    def save(self, folder: str | os.PathLike[str]) -> None:
        write_json(Path(folder, self.FILE), {"characters": self.characters}, indent=None)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> CharTokenizer:
        """Read `characters.json` in a folder."""
        path = Path(folder, cls.FILE)
        saved = read_json(path)
        if not isinstance(saved.get("characters"), str):
            raise CheckpointError(f'{path} must hold {{"characters": "..."}}')
        with naming_file(path):
            return cls(saved["characters"])

    def __repr__(self) -> str:
        return f"CharTokenizer({self.characters!r})"


def check_vocabulary(vocab: dict[str, int]) -> None:
    """Check that each token is text and has an id of its own, at least 0.

    Raises:
        ValueError: one is not.
    """
    tokens: dict[int, str] = {}
    for token, i in vocab.items():
        _check_text(token)
        _check_unicode(token)
        if not token:
            raise ValueError(f"the vocabulary has an empty token, with id {i}")
        if check_count(i, f"the id of the token {token!r}", 0) in tokens:
            raise ValueError(f"the tokens {tokens[i]!r} and {token!r} have the same id, {i}")
        tokens[i] = token


END_OF_TEXT = "<|endoftext|>"


class BPETokenizer(Tokenizer):
    """GPT-2's byte-level byte pair encoding, computed by the library `tokenizers` (the extra `bpe`).

    Args:
        vocab: {token: id}, tokens written in GPT-2's alphabet, one printable character per byte.
        merges: pairs of tokens in the order in which they are joined.
        special: tokens of the vocabulary that ordinary text is never encoded to. None: "<|endoftext|>", if it is one.

    Raises:
        ImportError: `tokenizers` is not installed.
        ValueError: a byte has no token, so some text could not be encoded; an id that two tokens have, or that is no
            integer; an empty token; a special token that is not in `vocab`.
    """

    FILE = "tokenizer.json"

    def __init__(
        self, vocab: dict[str, int], merges: Iterable[tuple[str, str]], special: Iterable[str] | None = None
    ) -> None:
        library = _tokenizers()
        missing = [byte for byte, symbol in enumerate(BYTE_SYMBOLS) if symbol not in vocab]
        if missing:
            examples = ", ".join(map(str, missing[:5])) + (" and more" if len(missing) > 5 else "")
            raise ValueError(f"a byte-level vocabulary has a token for each of the 256 bytes; missing: {examples}")
        check_vocabulary(vocab)
        self.special = [token for token in [END_OF_TEXT] if token in vocab] if special is None else list(special)
        for token in self.special:
            if token not in vocab:
                raise ValueError(f"the special token {token!r} is not in the vocabulary")
        self.vocab_size = max(vocab.values()) + 1
        self._bytes = {
            i: token.encode() if token in self.special else symbol_bytes(token) for token, i in vocab.items()
        }
        try:
            model = library.models.BPE(vocab=vocab, merges=[tuple(pair) for pair in merges])
        except Exception as error:  # the library has no class of its own
            raise ValueError(f"the vocabulary and the merges do not fit together: {error}") from error
        self._library = library.Tokenizer(model)
        self._library.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._library.decoder = library.decoders.ByteLevel()
        self._library.add_special_tokens(self.special)

    def encode(self, text: str, allow_special: bool = False) -> np.ndarray:
        """The ids of a text.

        Args:
            allow_special: whether "<|endoftext|>" in the text is encoded as the special token. Otherwise it is encoded
                as ordinary text, so that user input cannot end a document.
        """
        _check_text(text)
        _check_unicode(text)
        self._library.encode_special_tokens = not allow_special
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.int64)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join([self._bytes.get(i, b"") for i in self._check_ids(ids)])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that Hugging Face transformers opens: tokenizer.json, vocab.json and merges.txt."""
        text = self._library.to_str()
        model = json.loads(text)["model"]
        rules = [rule if isinstance(rule, str) else " ".join(rule) for rule in model["merges"]]
        files = {self.FILE: text, "vocab.json": json.dumps(model["vocab"], ensure_ascii=False)}
        files["merges.txt"] = "\n".join(["#version: 0.2", *rules, ""])
        for name, content in files.items():
            with replacing(Path(folder, name)) as temporary:
                temporary.write_text(content, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> BPETokenizer:
        """Read a folder with `tokenizer.json`, or with `vocab.json` and `merges.txt`.

        Raises:
            FileNotFoundError: the folder has neither.
            ValueError: the files do not describe a tokenizer of GPT-2's kind.
        """
        path = Path(folder, cls.FILE)
        if path.exists():
            return cls._from_json(path)
        vocab = read_json(Path(folder, "vocab.json"))
        lines = read_text(Path(folder, "merges.txt")).split("\n")
        # The first line may state a version. Later lines that begin with "#" are merges.
        lines = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :]]
        rules = [line.split(" ") for line in lines if line]
        vocab, pairs = _check_vocab(vocab, Path(folder, "vocab.json")), _check_merges(rules, Path(folder, "merges.txt"))
        with naming_file(folder):
            return cls(vocab, pairs)

    @classmethod
    def _from_json(cls, path: Path) -> BPETokenizer:
        saved = read_json(path)
        model, before = saved.get("model"), saved.get("pre_tokenizer")
        if not (isinstance(model, dict) and isinstance(before, dict) and model.get("type", "BPE") == "BPE"):
            raise CheckpointError(f"{path} is not a byte pair encoding as GPT-2 has it: expected a model of type BPE")
        if before.get("type") != "ByteLevel" or before.get("add_prefix_space") or saved.get("normalizer"):
            raise CheckpointError(
                f"{path} prepares text in another way than GPT-2: expected the pre-tokenizer ByteLevel without a "
                f"prefix space and no normalizer, got {before} and {saved.get('normalizer')}"
            )
        tokens, rules = saved.get("added_tokens", []), model.get("merges", [])
        if not isinstance(tokens, list) or not all(isinstance(t, dict) and {"content", "id"} <= {*t} for t in tokens):
            raise CheckpointError(f"{path} must hold added_tokens, a list of {{content, id}}")
        added = [(token["content"], token["id"]) for token in tokens]
        if not all(isinstance(content, str) for content, _ in added) or not isinstance(rules, list):
            raise CheckpointError(f"{path} must hold the text of each of added_tokens, and merges, a list")
        rules = [rule.split(" ") if isinstance(rule, str) else rule for rule in rules]
        vocab = {**_check_vocab(model.get("vocab"), path), **_check_vocab(dict(added), path)}
        with naming_file(path):
            return cls(vocab, _check_merges(rules, path), dict(added))

    def __repr__(self) -> str:
        return f"BPETokenizer({self.vocab_size} tokens, special: {self.special})"


class StreamDecoder:
    """Decodes ids one by one. A character is returned when it is complete.

    Example:
        >>> decoder = StreamDecoder(CharTokenizer("ab"))
        >>> decoder.push(1) + decoder.push(0) + decoder.flush()
        'ba'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is completed by one more id; it may be empty."""
        return self._decoder.decode(self.tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """U+FFFD if a character is incomplete, else "". The decoder can then be used for another text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer in a folder: `characters.json`, or `tokenizer.json`, or `vocab.json` and `merges.txt`.

    Raises:
        FileNotFoundError: the folder has none of these.
        ValueError: a file does not have the expected content.
    """
    if Path(folder, CharTokenizer.FILE).exists():
        return CharTokenizer.load(folder)
    if Path(folder, BPETokenizer.FILE).exists() or Path(folder, "vocab.json").exists():
        return BPETokenizer.load(folder)
    raise FileNotFoundError(
        f"no tokenizer in {folder}: expected {CharTokenizer.FILE}, or {BPETokenizer.FILE}, or vocab.json and merges.txt"
    )


def name_token(tokenizer: Any, i: int) -> str:
    """The piece of text of a token id, for people to read.

    Bytes that are a part of a character are written as `\\xe4`, an id that the tokenizer does not know as `<7>`, and
    without a tokenizer (None) an id is its own name.

    Example:
        >>> name_token(CharTokenizer.of("abc"), 1), name_token(None, 1)
        ('b', '1')
    """
    if tokenizer is None:
        return str(i)
    try:
        text: str = tokenizer.decode([i])
        if "\ufffd" in text:
            return "".join(f"\\x{byte:02x}" for byte in tokenizer.decode_bytes([i]))
    except (ValueError, LookupError):  # a model may have more ids than its tokenizer
        return f"<{i}>"
    return text


def show_token(token: str) -> str:
    """A token with a visible sign for each control character, and for spaces if it holds nothing but white space.

    So a token cannot give orders to a terminal.
    """
    shown = token.translate(SIGNS)
    return shown if token.strip() else shown.replace(" ", "␣") or "∅"


SIGNS = {i: chr(0x2400 + i) for i in range(32)} | {9: "⇥", 10: "⏎", 127: "␡"}  # by code point
SIGNS |= dict.fromkeys(range(128, 160), "\ufffd")


def byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte: printable Latin-1 as it is, other bytes from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_SYMBOLS = byte_symbols()
BYTE_OF = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


def symbol_bytes(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet; other characters are encoded as UTF-8."""
    return b"".join([bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in token])


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let the errors about what a file holds name it."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError('byte pair encoding needs the extra "bpe": pip install "tinygrad_mha[bpe]"') from error
    return tokenizers


def _check_vocab(vocab: Any, path: Path) -> dict[str, int]:
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < 2**32 for i in vocab.values()):
        raise CheckpointError(f"{path} must hold a vocabulary, {{token: id}}, with ids from 0 to 2^32 - 1")
    return vocab


def _check_merges(rules: list[Any], path: Path) -> list[tuple[str, str]]:
    for i, rule in enumerate(rules):
        if not isinstance(rule, list) or len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            raise CheckpointError(f"{path}: merge {i} must be a pair of tokens, got {rule}")
    return [(left, right) for left, right in rules]


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"expected text (str), got {type(text).__name__}")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"position {error.start} of the text is half of a character (U+{code:04X}, a lone surrogate), which UTF-8 "
            f"cannot express: repair the text, as text.encode(errors='replace').decode() does"
        ) from error


# --------------------------------------------------------------------------------------------------------------------
# Text


def read_text(path: str | os.PathLike[str]) -> str:
    """The exact text of a UTF-8 file, line ends included. Only a byte order mark is removed.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is a folder, a pipe or a device, or empty, or not UTF-8 (the message gives the byte).
    """
    try:
        raw = read_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no text file {path}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start} ({error.reason}); "
            f"save it as UTF-8 first"
        ) from error
    text = text.removeprefix("\ufeff")
    if not text:
        raise CheckpointError(f"{path} is empty")
    return text


def builtin_corpus() -> str:
    """A text of about 465 000 characters that is part of CPython: the language reference of `help("topics")`.

    It differs between versions of Python.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError("this Python carries no language reference (pydoc_data): give a text file") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def split_words(sentence: str) -> list[str]:
    """The words of a sentence: what stands between spaces, and each Chinese or Japanese character by itself.

    Example:
        >>> split_words("the cat 猫坐下")
        ['the', 'cat', '猫', '坐', '下']
    """
    return re.findall(rf"[{CJK}]|[^\s{CJK}]+", sentence)


def split_text(text: str, fraction: float = 0.9) -> tuple[str, str]:
    """Split a text into its first `fraction`, for training, and the rest, for validation, as nanoGPT does."""
    n = int(fraction * len(text))
    return text[:n], text[n:]


# --------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """An endless iterator over random windows of a sequence of ids: `x, y = next(batches)`.

    All windows are equally likely. Their order depends on the seed only, and `state_dict` stores the position in it.

    Args:
        ids: integers, shape (n,), n >= block_size + 1.
        block_size: T, the length of a window.
        batch_size: B, the number of windows.
        seed: an int or a list of ints for the generator.

    Example:
        >>> x, y = next(Batches(np.arange(10), block_size=8, batch_size=3, seed=0))
        >>> x.shape, bool((y == x + 1).all())
        ((3, 8), True)
    """

    def __init__(self, ids: Any, block_size: int, batch_size: int, seed: int | list[int] = 0) -> None:
        self.ids = np.asarray(ids)
        if self.ids.ndim != 1 or self.ids.dtype.kind not in "iu":
            raise ValueError(f"expected one row of integer ids, got shape {self.ids.shape} of {self.ids.dtype}")
        block_size, batch_size = check_count(block_size, "block_size"), check_count(batch_size, "batch_size")
        if len(self.ids) < block_size + 1:
            raise ValueError(
                f"the text is too short: {len(self.ids)} tokens, and a block of {block_size} with its targets takes "
                f"{block_size + 1}; give a longer text or a smaller block_size"
            )
        self.block_size = block_size
        self.batch_size = batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        """x and y, both (B, T), int64, newly allocated; y[i, t] is the token after x[i, t]."""
        return self.at(self.rng.integers(len(self.ids) - self.block_size, size=self.batch_size))

    def at(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x and y of the windows that begin at `starts`, (B,)."""
        rows = np.asarray(starts)[:, None] + np.arange(self.block_size)
        return self.ids[rows].astype(np.int64), self.ids[rows + 1].astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, in plain numbers, for `load_state_dict`."""
        return {"generator": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            ValueError: it is no such state. Nothing is changed.
        """
        restore_generator(self.rng, state["generator"])


def restore_generator(rng: np.random.Generator, state: Any) -> None:
    """Set a generator to a state that `rng.bit_generator.state` gave, such as one that was saved as JSON.

    Raises:
        ValueError: it is no such state. The generator is unchanged.
    """
    before = rng.bit_generator.state
    try:
        rng.bit_generator.state = state
        fits = json.dumps(rng.bit_generator.state, default=to_plain) == json.dumps(state, default=to_plain)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        fits = False
    if not fits:
        rng.bit_generator.state = before
        raise ValueError(f"{state!r} is not the state of a generator of the kind {before['bit_generator']}")
