"""The number words of the translation examples are correct in both languages, and the split has no overlap."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "translation"))

from number_words import LARGEST, ONES, TENS, split_numbers, to_chinese, to_english

# Written by hand, not by the program.
KNOWN = {
    0: ("zero", "零"),
    2: ("two", "二"),
    10: ("ten", "十"),
    12: ("twelve", "十二"),
    20: ("twenty", "二十"),
    21: ("twenty one", "二十一"),
    100: ("one hundred", "一百"),
    101: ("one hundred and one", "一百零一"),
    110: ("one hundred and ten", "一百一十"),
    112: ("one hundred and twelve", "一百一十二"),
    205: ("two hundred and five", "二百零五"),
    999: ("nine hundred and ninety nine", "九百九十九"),
    1000: ("one thousand", "一千"),
    1001: ("one thousand and one", "一千零一"),
    1010: ("one thousand and ten", "一千零一十"),
    1100: ("one thousand one hundred", "一千一百"),
    1234: ("one thousand two hundred and thirty four", "一千二百三十四"),
    10_000: ("ten thousand", "一万"),
    10_004: ("ten thousand and four", "一万零四"),
    12_304: ("twelve thousand three hundred and four", "一万二千三百零四"),
    20_050: ("twenty thousand and fifty", "二万零五十"),
    100_000: ("one hundred thousand", "十万"),
    100_001: ("one hundred thousand and one", "十万零一"),
    110_000: ("one hundred and ten thousand", "十一万"),
    1_000_000: ("one million", "一百万"),
    1_000_100: ("one million one hundred", "一百万零一百"),
    1_200_034: ("one million two hundred thousand and thirty four", "一百二十万零三十四"),
    10_010_001: ("ten million ten thousand and one", "一千零一万零一"),
    10_100_000: ("ten million one hundred thousand", "一千零一十万"),
    20_002_000: ("twenty million two thousand", "二千万二千"),
    99_999_999: (
        "ninety nine million nine hundred and ninety nine thousand nine hundred and ninety nine",
        "九千九百九十九万九千九百九十九",
    ),
}


@pytest.mark.parametrize("n", KNOWN)
def test_numbers_equal_those_written_by_hand(n):
    assert " ".join(to_english(n)) == KNOWN[n][0]
    assert "".join(to_chinese(n)) == KNOWN[n][1]


def read_english(words):
    """Return the number that the words mean. Shares no code with the function that writes them."""
    total = group = 0
    for word in words:
        if word == "hundred":
            group *= 100
        elif word in ("thousand", "million"):
            total += group * (1000 if word == "thousand" else 1_000_000)
            group = 0
        elif word != "and":
            group += ONES.index(word) if word in ONES else 10 * TENS.index(word)
    return total + group


def read_chinese(characters):
    total = group = 0
    digit = None
    for c in characters:
        if c in "十百千":
            group += (1 if digit is None else digit) * {"十": 10, "百": 100, "千": 1000}[c]
            digit = None
        elif c == "万":
            total, group, digit = (group + (digit or 0)) * 10_000, 0, None
        elif c != "零":
            digit = "零一二三四五六七八九".index(c)
    return total + group + (digit or 0)


def test_all_numbers_to_twenty_thousand_can_be_read_back():
    for n in range(20_001):
        assert read_english(to_english(n)) == n
        assert read_chinese(to_chinese(n)) == n


@given(st.integers(0, LARGEST))
def test_any_number_can_be_read_back(n):
    assert read_english(to_english(n)) == n
    assert read_chinese(to_chinese(n)) == n


@given(st.integers(1, LARGEST))
def test_chinese_zeros_and_tens_are_in_valid_positions(n):
    text = "".join(to_chinese(n))
    assert "零零" not in text
    assert text[0] != "零"
    assert text[-1] != "零"
    assert not text.startswith("一十")
    assert all(before in "一二三四五六七八九" for before, unit in itertools.pairwise(text) if unit == "十")


@given(st.integers(0, LARGEST))
def test_and_comes_only_before_a_number_below_a_hundred(n):
    words = to_english(n)
    for i, word in enumerate(words):
        if word == "and":
            assert 0 < i < len(words) - 1
            assert words[i - 1] in ("hundred", "thousand", "million")
            assert words[i + 1] in ONES[1:] + TENS[2:]
            assert "hundred" not in words[i + 1 : i + 3]


@pytest.mark.parametrize("n", [-1, LARGEST + 1, 1.0, True, "3", None])
def test_anything_but_a_number_in_range_is_refused(n):
    for write in (to_english, to_chinese):
        with pytest.raises(ValueError, match="whole number from 0 to 99999999"):
            write(n)


def test_numpy_integers_are_accepted():
    assert to_chinese(np.int64(12)) == ["十", "二"]


# --------------------------------------------------------------------------------------------------------------------
# Training and test


def test_no_number_is_in_two_lists():
    train, validation, test = split_numbers(72_000, 700, 800)
    assert [len(part) for part in (train, validation, test)] == [72_000, 700, 800]
    assert len({*validation, *test}) == 700 + 800
    assert not {*train} & {*validation, *test}


def test_all_small_numbers_are_in_training_and_none_is_held_out():
    train, validation, test = split_numbers(7200, 300, 300)
    assert set(range(1000)) <= set(train)
    assert min(validation + test) >= 1000


def test_each_length_is_drawn_equally_often():
    train, _, test = split_numbers(7200, 100, 2000)
    assert np.bincount([len(str(n)) for n in train]).tolist() == [0] + [900] * 8
    counts = np.bincount([len(str(n)) for n in test])[4:]
    assert len(counts) == 5
    assert counts.min() > 380  # of the 420 of each length that validation and test share


def test_numbers_repeat_only_if_there_are_too_few():
    train, validation, test = split_numbers(80_000, 100, 100)
    counts = Counter(train)
    assert {counts[n] for n in range(10)} == {1000}
    four = [n for n in range(1000, 10_000) if n not in {*validation, *test}]
    assert {counts[n] for n in four} == {1, 2}
    assert max(counts[n] for n in counts if n >= 10_000) == 1


def test_every_word_of_the_held_out_numbers_occurs_in_training():
    train, validation, test = split_numbers(7200, 500, 500)
    for write in (to_english, to_chinese):
        known = {word for n in train for word in write(n)}
        assert {word for n in validation + test for word in write(n)} <= known


def test_the_split_depends_on_the_seed_only():
    assert split_numbers(7200, 50, 50, seed=1) == split_numbers(7200, 50, 50, seed=1)
    assert split_numbers(7200, 50, 50, seed=1) != split_numbers(7200, 50, 50, seed=2)


def test_too_few_numbers_for_training_are_refused():
    with pytest.raises(ValueError, match="n_train is 7200 or more, got 7199"):
        split_numbers(7199)
