"""Numbers in words: English on one side, Chinese on the other, exact from 0 to 99 999 999.

English counts in groups of three digits (thousand, million), Chinese in groups of four (万), so a number cannot be
translated word by word: 12 304 is "twelve thousand three hundred and four" and 一万二千三百零四. English omits zeros;
Chinese writes one 零 for each gap: 10 004 is 一万零四.
"""

import numpy as np

LARGEST = 99_999_999

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GROUPS = ((1_000_000, "million"), (1_000, "thousand"))

DIGITS = "零一二三四五六七八九"
UNITS = ("千", "百", "十", "")


def check_number(n):
    """Return `n` as a Python int, or raise ValueError."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 <= n <= LARGEST:
        raise ValueError(f"expected a whole number from 0 to {LARGEST}, got {n!r}")
    return int(n)


def to_english(n):
    """Return the words of a number, with the British "and".

    >>> " ".join(to_english(12_304))
    'twelve thousand three hundred and four'
    """
    n = check_number(n)
    words = []
    for size, name in GROUPS:
        if n >= size:
            words += [*write_below_thousand(n // size), name]
            n %= size
    if words and 0 < n < 100:
        words.append("and")
    return words + write_below_thousand(n) if n or not words else words


def write_below_thousand(n):
    """Return the words of 0 to 999."""
    hundreds, rest = divmod(n, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if words and rest:
        words.append("and")
    if rest >= 20:
        words += [TENS[rest // 10]] + ([ONES[rest % 10]] if rest % 10 else [])
    elif rest or not words:
        words.append(ONES[rest])
    return words


def to_chinese(n):
    """Return the numerals of a number, one character each.

    A gap of zeros between digits is one 零, and zeros at the end are not written. 10 to 19 begin with 十 without a
    digit, but only at the beginning of the number: 十二, but 一百一十二.

    >>> "".join(to_chinese(12_304))
    '一万二千三百零四'
    """
    high, low = divmod(check_number(n), 10_000)
    if not high:
        written = write_four_digits(low)
    else:
        # There is a gap after 万 if the last four digits begin with a zero and are not all zero.
        gap = "零" if 0 < low < 1000 else ""
        written = write_four_digits(high) + "万" + gap + (write_four_digits(low) if low else "")
    return list(written.removeprefix("一") if written.startswith("一十") else written)


def write_four_digits(n):
    """Return the numerals of 0 to 9999, in units of 千, 百 and 十."""
    if n == 0:
        return "零"
    written, gap = "", False
    for digit, unit in zip(f"{n:04d}", UNITS, strict=True):
        if digit == "0":
            gap = bool(written)  # leading zeros are not a gap; zeros at the end are followed by no digit
        else:
            written += ("零" if gap else "") + DIGITS[int(digit)] + unit
            gap = False
    return written


# --------------------------------------------------------------------------------------------------------------------
# The split into training, validation and test


LENGTHS = range(1, 9)  # numbers of digits


def split_numbers(n_train, n_validation=1000, n_test=1000, seed=0):
    """Return the numbers for training, validation and test; no number is in two of these lists.

    Each length is drawn equally often. Validation and test contain distinct numbers of four digits and more. All
    numbers below 1000 are in training, where they are repeated: they are few, and a word that does not occur in
    training cannot be learned.

    Raises:
        ValueError: `n_train` is too small to contain all numbers below 1000.
    """
    rng = np.random.default_rng(seed)
    per_length, least = n_train // len(LENGTHS), 900
    if per_length < least:
        raise ValueError(
            f"all numbers below 1000 are for training, so n_train is {least * len(LENGTHS)} or more, got {n_train}"
        )
    n = n_validation + n_test
    held_out = [number for length in (4, 5, 6, 7, 8) for number in draw_numbers(rng, length, -(-n // 5), set())]
    held_out = [int(number) for number in rng.permutation(held_out)[:n]]
    train = [number for length in LENGTHS for number in draw_numbers(rng, length, per_length, set(held_out))]
    return train, held_out[:n_validation], held_out[n_validation:]


def draw_numbers(rng, length, n, exclude):
    """Draw `n` numbers of `length` digits that are not in `exclude`, in random order.

    They are distinct; if there are fewer than `n` such numbers, the sequence is repeated. Half of the long numbers, on
    average, are made rounder: each digit after the first is replaced by 0 with probability 1/2. Otherwise numbers such
    as two million and five would almost never be drawn.
    """
    low, high = (10 ** (length - 1) if length > 1 else 0), 10**length
    if high <= 10_000:
        return np.resize(rng.permutation([k for k in range(low, high) if k not in exclude]), n).tolist()
    found = {}  # a dict keeps the order
    while len(found) < n:
        digits = list(str(rng.integers(low, high)))
        if rng.random() < 0.5:
            digits[1:] = [digit if rng.random() < 0.5 else "0" for digit in digits[1:]]
        number = int("".join(digits))
        if number not in exclude:
            found[number] = True
    return list(found)
