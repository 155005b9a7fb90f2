import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_data import read_packed

from tinygrad_mha.data import (
    BYTE_SYMBOLS,
    Batches,
    BPETokenizer,
    CharTokenizer,
    StreamDecoder,
    builtin_corpus,
    load_tokenizer,
    read_text,
    split_text,
    symbol_bytes,
)

WHITE_SPACE = [
    "hello\nworld",
    "\n\n",
    "a\r\nb",
    "a\u2028b",
    "\nends\n",
    "\f\v\t",
    "it's we'll I'M",
    "3.14 1000000",
    "_x_",
    "  two  ",
    "",
    " ",
]


# --------------------------------------------------------------------------------------------------------- characters


@given(st.text(min_size=1))
def test_characters_round_trip_exactly(text):
    tokenizer = CharTokenizer.of(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("text", WHITE_SPACE)
def test_characters_keep_white_space(text):
    tokenizer = CharTokenizer.of(text + "x")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_characters_are_sorted_by_code_point():
    tokenizer = CharTokenizer.of("né\nA地a")
    assert tokenizer.characters == "\nAané地"
    assert tokenizer.vocab_size == 6


def test_an_unknown_character_is_reported_with_its_position_and_the_vocabulary():
    with pytest.raises(ValueError, match=r"'é' \(U\+00E9\) at position 3 .* 4 characters, ' acf'"):
        CharTokenizer(" acf").encode("cafés")


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([0, 5, 1], ValueError, r"id 5 at position 1 is not in the vocabulary of 5"),
        ([0, -1], ValueError, r"id -1 at position 1"),
        ([0.0, 1.0], TypeError, "integers, got float64"),
        ([True], TypeError, "integers, got bool"),
        ([[0, 1], [1, 2]], ValueError, r"shape \(2, 2\): decode the rows one by one"),
    ],
)
def test_ids_that_cannot_be_decoded_are_refused(ids, error, words):
    with pytest.raises(error, match=words):
        CharTokenizer("abcde").decode(ids)


def test_empty_text_encodes_to_no_ids_and_back():
    tokenizer = CharTokenizer("a")
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([]) == tokenizer.decode(np.zeros(0, np.int64)) == ""


@pytest.mark.parametrize(
    ("characters", "words"), [("", "got no characters"), ("abcab", "got ['a', 'b'] more than once")]
)
def test_an_empty_vocabulary_or_one_with_duplicates_is_refused(characters, words):
    with pytest.raises(ValueError, match=f"each character once and at least one, {re.escape(words)}"):
        CharTokenizer(characters)


@pytest.mark.parametrize("text", [b"bytes", None, ["a"]])
def test_only_text_can_be_encoded(text):
    with pytest.raises(TypeError, match=r"expected text \(str\)"):
        CharTokenizer("abc").encode(text)


def test_a_character_tokenizer_is_saved_and_loaded(tmp_path):
    tokenizer = CharTokenizer.of('a\n"\\地😀\u2028\ud800')
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).characters == tokenizer.characters
    assert [p.name for p in tmp_path.iterdir()] == ["characters.json"]


@pytest.mark.parametrize("content", ["[]", '{"characters": 3}', "{", '{"characters": "aa"}'])
def test_a_damaged_vocabulary_file_is_refused(tmp_path, content):
    (tmp_path / "characters.json").write_text(content)
    with pytest.raises(ValueError, match=r"characters.json|once"):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused_with_the_expected_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"characters.json, or tokenizer.json, or vocab.json and merges.txt"):
        load_tokenizer(tmp_path)


# ------------------------------------------------------------------------------------------------- byte pair encoding


def small_bpe(**options):
    pytest.importorskip("tokenizers")
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    tokens = [*BYTE_SYMBOLS, *(a + b for a, b in merges), "<|endoftext|>"]
    return BPETokenizer({token: i for i, token in enumerate(tokens)}, merges, **options)


def test_each_byte_has_its_own_printable_symbol():
    assert len(set(BYTE_SYMBOLS)) == 256
    assert all(symbol.isprintable() and not symbol.isspace() for symbol in BYTE_SYMBOLS)
    assert BYTE_SYMBOLS[ord(" ")] == "Ġ"
    assert symbol_bytes("".join(BYTE_SYMBOLS)) == bytes(range(256))


@given(st.text(st.characters(codec="utf-8")))
def test_byte_pairs_round_trip_exactly(text):
    tokenizer = small_bpe()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("text", WHITE_SPACE)
def test_byte_pairs_keep_white_space(text):
    tokenizer = small_bpe()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_split_into_words_before_merges_apply():
    tokenizer = small_bpe()
    assert [tokenizer.decode([i]) for i in tokenizer.encode("hello\nhello world")][:4] == ["hello", "\n", "hello", " w"]


def test_special_tokens_are_ordinary_text_unless_allowed():
    tokenizer = small_bpe()
    end = 261
    text = "a<|endoftext|><|endoftext|>b"
    assert tokenizer.encode("<|endoftext|>", allow_special=True).tolist() == [end]
    assert tokenizer.encode(text, allow_special=True).tolist() == [ord("a"), end, end, ord("b")]
    spelled = tokenizer.encode(text)
    assert end not in spelled
    assert tokenizer.decode(spelled) == tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_a_special_token_may_contain_spaces():
    pytest.importorskip("tokenizers")
    vocab = {token: i for i, token in enumerate([*BYTE_SYMBOLS, "<the end>"])}
    tokenizer = BPETokenizer(vocab, [], special=["<the end>"])
    assert tokenizer.encode("x<the end>", allow_special=True).tolist() == [ord("x"), 256]
    assert tokenizer.decode([256]) == "<the end>"


def test_an_incomplete_character_is_decoded_to_a_replacement():
    tokenizer = small_bpe()
    ids = list(b"1 1\xe2\x81")  # the ids of this vocabulary begin with the bytes
    assert tokenizer.decode_bytes(ids) == b"1 1\xe2\x81"
    assert tokenizer.decode(ids) == "1 1\ufffd"


@pytest.mark.parametrize("byte", [0, 65, 127, 128, 160, 173, 255])
def test_a_single_byte_decodes_without_error(byte):
    tokenizer = small_bpe()
    assert tokenizer.decode_bytes([byte]) == bytes([byte])
    assert tokenizer.decode([byte]) == bytes([byte]).decode("utf-8", "replace")


def test_a_byte_pair_tokenizer_is_saved_and_loaded(tmp_path):
    tokenizer = small_bpe()
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "hello<|endoftext|> world 地"
    assert again.vocab_size == tokenizer.vocab_size == 262
    assert np.array_equal(again.encode(text), tokenizer.encode(text))
    assert np.array_equal(again.encode(text, allow_special=True), tokenizer.encode(text, allow_special=True))
    json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))


def test_a_vocabulary_may_have_holes(tmp_path):
    pytest.importorskip("tokenizers")
    tokens = {token: 2 * i for i, token in enumerate(BYTE_SYMBOLS)}
    tokenizer = BPETokenizer(tokens | {"he": 1009}, [("h", "e")])
    assert tokenizer.vocab_size == 1010
    assert tokenizer.encode("he")[0] == 1009
    assert tokenizer.decode(tokenizer.encode("he地")) == "he地"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("he地").tolist() == tokenizer.encode("he地").tolist()


@pytest.mark.parametrize("first_line", ["#version: 0.2\n", ""])
def test_merges_may_begin_with_a_version_or_without(tmp_path, first_line):
    tokenizer = small_bpe()
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    path = tmp_path / "merges.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("#version: 0.2\n", first_line), encoding="utf-8")
    assert load_tokenizer(tmp_path).encode("hello world").tolist() == tokenizer.encode("hello world").tolist()


def test_a_merge_of_the_sign_of_a_comment_is_a_merge(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = BPETokenizer(
        {token: i for i, token in enumerate([*BYTE_SYMBOLS, "##", "he"])}, [("#", "#"), ("h", "e")]
    )
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).encode("##he").tolist() == tokenizer.encode("##he").tolist() == [256, 257]


def test_a_vocabulary_that_lacks_a_byte_is_refused():
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"each of the 256 bytes; missing: 32$"):
        BPETokenizer({symbol: i for i, symbol in enumerate(BYTE_SYMBOLS) if symbol != "Ġ"}, [])


@pytest.mark.parametrize(
    ("entries", "special", "message"),
    [
        ({"xx": 7}, None, "have the same id, 7"),
        ({"": 300}, None, "empty token, with id 300"),
        ({"xx": 0.5}, None, "the id of the token 'xx' must be an integer"),
        ({"xx": -1}, None, "the id of the token 'xx' must be an integer"),
        ({"\ud800": 300}, None, "half of a character"),
        ({}, ["<x>"], "special token '<x>' is not in the vocabulary"),
    ],
)
def test_a_vocabulary_that_is_ambiguous_is_refused(entries, special, message):
    pytest.importorskip("tokenizers")
    vocab = {symbol: i for i, symbol in enumerate(BYTE_SYMBOLS)} | entries
    with pytest.raises(ValueError, match=message):
        BPETokenizer(vocab, [], special)


def test_half_of_a_character_is_no_text_for_bytes():
    with pytest.raises(
        ValueError, match=r"position 2 of the text is half of a character \(U\+D83D, a lone surrogate\)"
    ):
        small_bpe().encode("he\ud83d")


def test_merges_with_the_line_ends_of_windows_are_read(tmp_path):
    small_bpe().save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    merges = tmp_path / "merges.txt"
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert load_tokenizer(tmp_path).encode("hello w").tolist() == small_bpe().encode("hello w").tolist()


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"model": {"type": "WordPiece"}, "pre_tokenizer": {"type": "ByteLevel"}}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Whitespace"}}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true}}',
        '{"model": {"type": "BPE", "vocab": ["a"]}, "pre_tokenizer": {"type": "ByteLevel"}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}, "pre_tokenizer": {"type": "ByteLevel"}}',
    ],
)
def test_a_tokenizer_file_of_another_kind_is_refused(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_error_names_the_extra_if_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'pip install "tinygrad_mha\[bpe\]"'):
        BPETokenizer({}, [])


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """The files of GPT-2's tokenizer, as Hugging Face writes them."""
    folder = tmp_path_factory.mktemp("gpt2-bpe")
    for name in ("merges.txt", "vocab.json", "tokenizer.json"):
        (folder / name).write_bytes(read_packed(f"gpt2-bpe/{name}"))
    return folder


@pytest.fixture(scope="module")
def gpt2(gpt2_folder):
    pytest.importorskip("tokenizers")
    return BPETokenizer.load(gpt2_folder)


def test_gpt2_encodes_and_decodes_all_recorded_vectors(gpt2, data):
    records = (data / "gpt2-bpe/vectors.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = (data / "gpt2-bpe/vectors.out").read_text().split("\n")[:46]
    expected = [[int(i) for i in line.split()] for line in lines]
    assert len(records) == len(expected) == 46
    assert [gpt2.encode(record).tolist() for record in records] == expected
    assert [gpt2.decode(ids) for ids in expected] == records


def test_gpt2_encodes_its_special_token_as_text_unless_allowed(gpt2):
    assert gpt2.vocab_size == 50257
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("a<|endoftext|>", allow_special=True).tolist() == [64, 50256]
    assert gpt2.decode([50256]) == "<|endoftext|>"


def test_gpt2_from_vocabulary_and_merges_equals_gpt2_from_one_file(gpt2, gpt2_folder, data, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(gpt2_folder / name)
    other = load_tokenizer(tmp_path)
    text = (data / "gpt2-bpe/vectors.inp").read_bytes().decode() + "<|endoftext|>"
    assert np.array_equal(other.encode(text), gpt2.encode(text))
    assert other.encode(text, allow_special=True)[-1] == 50256


def test_gpt2_counts_the_tokens_of_shakespeare(gpt2, reference):
    train, validation = split_text(read_text(reference / "corpora" / "tinyshakespeare.txt"))
    assert (len(train), len(validation)) == (1_003_854, 111_540)
    assert (len(gpt2.encode(train)), len(gpt2.encode(validation))) == (301_966, 36_059)


# ---------------------------------------------------------------------------------------------------------- streaming


def bytes_one_by_one(data):
    """What a stream decoder, whose ids are bytes, returns for each byte of `data`."""

    class Bytes(CharTokenizer):
        def decode_bytes(self, ids):
            return bytes(ids)

    decoder = StreamDecoder(Bytes("a"))
    return [decoder.push(byte) for byte in data], decoder.flush()


def test_a_character_is_returned_when_it_is_complete():
    assert bytes_one_by_one("地é".encode()) == (["", "", "地", "", "é"], "")


def test_an_incomplete_end_is_flushed_as_a_replacement():
    assert bytes_one_by_one(b"a\xe5\x9c") == (["a", "", ""], "\ufffd")


@given(st.binary())
def test_streamed_text_equals_text_decoded_at_once(data):
    pieces, rest = bytes_one_by_one(data)
    assert "".join(pieces) + rest == data.decode("utf-8", "replace")


def test_a_flushed_decoder_starts_again():
    decoder = StreamDecoder(small_bpe())
    earth = small_bpe().encode("地")
    assert decoder.push(earth[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert [decoder.push(i) for i in earth] == ["", "", "地"]


# --------------------------------------------------------------------------------------------------------------- text


def test_reading_keeps_line_ends_and_removes_a_byte_order_mark(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(path) == "a\r\nb\rc\n"


def test_one_byte_order_mark_is_removed_and_others_are_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" * 2 + b"a\xef\xbb\xbf")
    assert read_text(path) == "\ufeffa\ufeff"


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("abc café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1.txt is not UTF-8: byte 0xe9 at position 7"):
        read_text(path)


def test_missing_files_empty_files_and_folders_have_their_own_errors(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty is empty"):
        read_text(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"no text file .*absent"):
        read_text(tmp_path / "absent")
    with pytest.raises(ValueError, match="is a folder"):
        read_text(tmp_path)


def test_the_builtin_corpus_is_real_text_and_the_same_every_time():
    text = builtin_corpus()
    assert len(text) > 300_000
    assert "assert" in text
    assert text == builtin_corpus()
    script = "import hashlib, tinygrad_mha.data as d; print(hashlib.sha256(d.builtin_corpus().encode()).hexdigest())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True
        ).stdout
        for seed in "12"
    }
    assert len(runs) == 1


def test_a_python_without_the_language_reference_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match="give a text file"):
        builtin_corpus()


@given(st.integers(0, 1000))
def test_the_split_is_complete_and_equals_nanogpt(n):
    text = "ab地" * n
    train, validation = split_text(text)
    assert train + validation == text
    assert len(train) == int(3 * n * 0.9)


# ------------------------------------------------------------------------------------------------------------ batches


def test_every_start_is_drawn_and_targets_are_the_next_tokens():
    ids = np.arange(10, dtype=np.uint16)
    batches = Batches(ids, block_size=8, batch_size=3, seed=0)
    starts = set()
    for _ in range(200):
        x, y = next(batches)
        assert x.shape == y.shape == (3, 8)
        assert x.dtype == y.dtype == np.int64
        assert np.array_equal(y, x + 1)
        assert not np.shares_memory(x, ids)
        assert not np.shares_memory(y, ids)
        starts.update(x[:, 0].tolist())
    assert starts == {0, 1}


def test_the_shortest_text_gives_its_one_window():
    x, y = next(Batches(np.arange(6), block_size=1, batch_size=1))
    assert (x + 1 == y).all()
    assert x.shape == (1, 1)
    x, y = next(Batches(np.arange(6), block_size=5, batch_size=2))
    assert x.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert y[0, -1] == 5


@pytest.mark.parametrize("n", [0, 1, 8])
def test_a_text_shorter_than_a_block_and_its_target_is_refused(n):
    with pytest.raises(ValueError, match=rf"too short: {n} tokens, and a block of 8 with its targets takes 9"):
        Batches(np.arange(n), block_size=8, batch_size=3)


@pytest.mark.parametrize(
    ("ids", "block", "batch"),
    [(np.ones(9), 2, 2), (np.ones((9, 9), int), 2, 2), (np.arange(9), 0, 2), (np.arange(9), 2, 0)],
)
def test_invalid_arguments_of_batches_are_refused(ids, block, batch):
    with pytest.raises(ValueError, match=r"expected one row of integer ids|must be an integer of at least 1"):
        Batches(ids, block, batch)


def test_the_order_depends_on_the_seed_alone():
    def first(seed):
        return [next(batches)[0].tolist() for batches in [Batches(np.arange(101), 7, 5, seed)] for _ in range(3)]

    zero = first(0)
    np.random.rand()  # the global generator must not matter
    assert first(0) == zero
    assert first(42) != zero
    assert first([0, 1]) != zero


def test_one_batch_of_sixty_equals_six_of_ten():
    large, small = Batches(np.arange(1009), 7, 60, 3), Batches(np.arange(1009), 7, 10, 3)
    for _ in range(3):
        assert np.array_equal(next(large)[0], np.concatenate([next(small)[0] for _ in range(6)]))


@pytest.mark.parametrize("drawn", [1, 2, 3])
def test_batches_continue_from_a_saved_state(drawn):
    batches = Batches(np.arange(101), 7, 5, seed=1)
    for _ in range(drawn):
        next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    following = [next(batches)[0].tolist() for _ in range(4)]
    again = Batches(np.arange(101), 7, 5, seed=9)
    again.load_state_dict(state)
    assert [next(again)[0].tolist() for _ in range(4)] == following
