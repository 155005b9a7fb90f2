"""Numbers in words: English on one side, Chinese on the other, exact from 0 to 99 999 999.

English counts in groups of three digits (thousand, million), Chinese in groups of four (万), so one sentence cannot
be had from the other word by word: 12 304 is "twelve thousand three hundred and four" and 一万二千三百零四. Zeros,
which English leaves out, are named in Chinese, once for each gap: 10 004 is 一万零四.
"""

import numpy as np

LARGEST = 99_999_999

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GROUPS = ((1_000_000, "million"), (1_000, "thousand"))

DIGITS = "零一二三四五六七八九"
UNITS = ("千", "百", "十", "")


def checked(n):
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 <= n <= LARGEST:
        raise ValueError(f"expected a whole number from 0 to {LARGEST}, got {n!r}")
    return int(n)


def english(n):
    """The words of a number, with the British "and".

    >>> " ".join(english(12_304))
    'twelve thousand three hundred and four'
    """
    n = checked(n)
    words = []
    for size, name in GROUPS:
        if n >= size:
            words += [*below_thousand(n // size), name]
            n %= size
    if words and 0 < n < 100:
        words.append("and")
    return words + below_thousand(n) if n or not words else words


def below_thousand(n):
    """The words of 0 to 999."""
    hundreds, rest = divmod(n, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if words and rest:
        words.append("and")
    if rest >= 20:
        words += [TENS[rest // 10]] + ([ONES[rest % 10]] if rest % 10 else [])
    elif rest or not words:
        words.append(ONES[rest])
    return words


def chinese(n):
    """The numerals of a number, one character each.

    A gap of zeros between digits is one 零, zeros at the end are silent, and 10 to 19 begin with a bare 十, though only
    at the beginning of the number: 十二, but 一百一十二.

    >>> "".join(chinese(12_304))
    '一万二千三百零四'
    """
    high, low = divmod(checked(n), 10_000)
    if not high:
        written = four_digits(low)
    else:
        # Zeros behind 万: there is a gap if the next four digits begin with one (and are not silent).
        gap = "零" if 0 < low < 1000 else ""
        written = four_digits(high) + "万" + gap + (four_digits(low) if low else "")
    return list(written.removeprefix("一") if written.startswith("一十") else written)


def four_digits(n):
    """0 to 9999 in units of 千, 百 and 十."""
    if n == 0:
        return "零"
    written, gap = "", False
    for digit, unit in zip(f"{n:04d}", UNITS, strict=True):
        if digit == "0":
            gap = bool(written)  # zeros in front are no gap, and those at the end never meet another digit
        else:
            written += ("零" if gap else "") + DIGITS[int(digit)] + unit
            gap = False
    return written


# --------------------------------------------------------------------------------------------------------------------
# Which numbers are learned from, and which are asked for


LENGTHS = range(1, 9)  # how many digits a number has


def split_numbers(n_train, n_validation=1000, n_test=1000, seed=0):
    """Three lists for training, validation and test; no number is in two of them.

    Lengths are drawn evenly in each. Validation and test hold different numbers of four digits and more: below 1000
    there are so few that all belong to training, where they come again and again, and a word that is never seen there
    could not be learned.
    """
    rng = np.random.default_rng(seed)
    share, least = n_train // len(LENGTHS), 900
    if share < least:
        raise ValueError(
            f"all numbers below 1000 are for training, so n_train is {least * len(LENGTHS)} or more, got {n_train}"
        )
    n = n_validation + n_test
    held_out = [number for length in (4, 5, 6, 7, 8) for number in of_length(rng, length, -(-n // 5), set())]
    held_out = [int(number) for number in rng.permutation(held_out)[:n]]
    train = [number for length in LENGTHS for number in of_length(rng, length, share, set(held_out))]
    return train, held_out[:n_validation], held_out[n_validation:]


def of_length(rng, length, n, exclude):
    """`n` numbers of so many digits in random order, different ones as long as there are any, and then from the first
    on again.

    Of long numbers, every other one on average is made rounder: each digit behind the first becomes 0 with a chance of
    one half. Digits that are all drawn evenly would leave no two million and five among eight thousand numbers.
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
