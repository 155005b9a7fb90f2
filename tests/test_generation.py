"""Generation: cached equals uncached, a row of a batch equals its prompt alone, and calls have no side effects."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.data import BYTE_SYMBOLS, BPETokenizer, CharTokenizer
from tinygrad_mha.decoding import ContextFullWarning, CountedModel, count_multiply_adds, generate, stream
from tinygrad_mha.modes import STATE

VOCABULARY, BLOCK = 29, 13
POSITIONS = ["learned", "sinusoidal", "rotary", "alibi", "relative", "none"]


def make_model(position="learned", dropout=0.0, seed=5, **options):
    """A GPT with large random weights in float64: its greedy text is not periodic and depends on all of the context."""
    config = tg.nn.GPTConfig(
        VOCABULARY, BLOCK, 2, 3, 18, position=position, dropout=dropout, tie_weights=False, **options
    )
    model = tg.nn.GPT(config, seed=seed).astype(np.float64)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.assign_(rng.standard_normal(parameter.shape) * (0.5 if ".h." in f".{name}" else 1.0))
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


def naive(model, prompt, n):
    """Greedy ids of one prompt, computed with calls of the model only."""
    ids = [int(i) for i in prompt]
    with tg.no_grad():
        for _ in range(n):
            ids.append(int(model(ids[-model.config.block_size :]).numpy()[-1].argmax()))
    return np.array(ids)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCABULARY, size=n) for n in lengths]


class Scripted(tg.nn.Module):
    """A model that predicts the next id of a fixed script, of which the prompt is the beginning."""

    def __init__(self, script, vocab_size):
        self.config = tg.nn.GPTConfig(vocab_size, len(script) + 1, 1, 1, 1)
        self.script = script

    def forward(self, idx, last_only=True):
        logits = np.full((len(idx), 1, self.config.vocab_size), -10.0)
        logits[:, 0, self.script[np.shape(idx)[1]]] = 10.0
        return tg.Tensor(logits)


# ----------------------------------------------------------------------------------------------------- cache and oracle


@pytest.mark.parametrize("position", POSITIONS)
def test_cached_equals_uncached_for_every_prompt_length(position):
    model = make_model(position)
    seen = set()
    for length in range(1, BLOCK + 1):
        (prompt,) = prompts_of([length], seed=length)
        new = BLOCK + 1 - length
        expected = naive(model, prompt, new)
        seen.update(expected[length:])
        for use_cache in (True, False):
            ids, logs = generate(model, prompt, new, temperature=0, use_cache=use_cache, logprobs=True)
            np.testing.assert_array_equal(ids, expected[None])
            with tg.no_grad():
                full = tg.ops.log_softmax(model(expected[:-1]).numpy())[length - 1 :]
            np.testing.assert_allclose(logs[0], full[np.arange(new), expected[length:]], rtol=0, atol=1e-12)
    assert len(seen) > 10  # a model with one favourite token would pass this test by chance


def test_a_call_does_not_influence_the_next_one(model):
    (one,), two = prompts_of([4]), np.stack(prompts_of([5, 5], seed=1))
    alone = [generate(model, prompt, 7, temperature=0) for prompt in (one, two)]
    for prompt, expected in [(two, alone[1]), (one, alone[0]), (one, alone[0]), (two, alone[1])]:
        np.testing.assert_array_equal(generate(model, prompt, 7, temperature=0), expected)


def test_interleaved_streams_are_independent(model):
    prompts = prompts_of([3, 6])
    streams = [stream(model, prompt, 6, temperature=0) for prompt in prompts]
    pairs = list(zip(*streams, strict=True))
    for prompt, tokens in zip(prompts, zip(*pairs, strict=True), strict=True):
        np.testing.assert_array_equal(tokens, naive(model, prompt, 6)[len(prompt) :])


@pytest.mark.parametrize("name", ["tiny-gpt2-random", "tiny-gpt1-random"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_equal_those_of_transformers(data, name, use_cache):
    expected = np.load(data / name / "expected_float64.npz")["greedy"]
    model = tg.nn.GPT.from_pretrained(data / name, dtype=np.float64)
    ids = generate(model, expected[:, :11], 13, temperature=0, use_cache=use_cache)
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_pretrained_sorting_model_sorts_all_729_sequences(data, use_cache):
    model = tg.nn.GPT.from_pretrained(data / "hf-gpt2" / "gpt-nano-sort")
    prompts = np.stack(np.meshgrid(*[np.arange(3)] * 6), axis=-1).reshape(-1, 6)
    ids = generate(model, prompts, 6, temperature=0, eos=None, use_cache=use_cache)
    np.testing.assert_array_equal(ids, np.hstack([prompts, np.sort(prompts)]))


@pytest.mark.slow
def test_a_pretrained_adder_adds_all_pairs_of_two_digit_numbers(data):
    model = tg.nn.GPT.from_pretrained(data / "hf-gpt2" / "mingpt-adder-2digit")
    a, b = np.divmod(np.arange(10_000), 100)
    prompts = np.stack([a // 10, a % 10, b // 10, b % 10], axis=-1)
    ones, tens, hundreds = generate(model, prompts, 3, temperature=0, eos=None)[:, 4:].T
    np.testing.assert_array_equal(ones + 10 * tens + 100 * hundreds, a + b)


# ----------------------------------------------------------------------------------------- prompts of different lengths


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_each_row_equals_its_prompt_alone(position, use_cache):
    model = make_model(position)
    prompts = prompts_of([5, 1, 7, 2, 7])
    ids, logs = generate(model, prompts, 6, temperature=0, use_cache=use_cache, logprobs=True)
    assert logs.shape == (5, 6)
    for row, log, prompt in zip(ids, logs, prompts, strict=True):
        alone, log_alone = generate(model, prompt, 6, temperature=0, logprobs=True)
        np.testing.assert_array_equal(row, alone[0])
        np.testing.assert_allclose(log, log_alone[0], rtol=0, atol=1e-12)


def test_the_id_that_pads_is_an_ordinary_token_in_a_prompt(model):
    prompts = [[0, 0, 1, 2], [3, 0, 1, 2], [1, 2], [0], [0, 0]]
    ids = generate(model, prompts, 6, temperature=0)
    for row, prompt in zip(ids, prompts, strict=True):
        np.testing.assert_array_equal(row, naive(model, prompt, 6))
    assert len({tuple(row[-6:]) for row in ids}) == 5


class Bigram(tg.nn.Module):
    """A user's own language model: no cache, no positions, logits from the last token alone."""

    def __init__(self, rng):
        self.config = tg.nn.GPTConfig(7, 5, 1, 1, 1)
        self.table = tg.Tensor(rng.standard_normal((7, 7)), requires_grad=True)

    def forward(self, idx, last_only=False):
        return self.table[idx[:, -1:] if last_only else idx]


def test_any_module_that_returns_logits_can_generate(rng):
    model = Bigram(rng)
    expected = [3]
    for _ in range(5):
        expected.append(int(model.table.numpy()[expected[-1]].argmax()))
    for options in ({}, {"use_cache": False}, {"beam": 2}):
        ids = generate(model, [3], 5, **({"temperature": 0} | options))
        assert ids.shape == (1, 6)
        if "beam" not in options:
            np.testing.assert_array_equal(ids, [expected])
    assert list(stream(model, [3], 5, temperature=0)) == expected[1:]


def test_rows_of_equal_length_are_an_array_and_others_a_list(model):
    same = generate(model, [[1, 2], [3, 4], [5, 6]], 3, seed=0)
    assert same.shape == (3, 5)
    assert same.dtype == np.int64
    differing = generate(model, [[1, 2, 3], [4]], 3, seed=0)
    assert isinstance(differing, list)
    assert [row.shape for row in differing] == [(6,), (4,)]
    assert {row.dtype for row in differing} == {np.dtype(np.int64)}
    assert generate(model, [1, 2, 3], 3, seed=0).shape == (1, 6)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 1, 4],
        (3, 1, 4),
        np.array([3, 1, 4], np.uint8),
        tg.Tensor(np.array([3, 1, 4])),
        [np.int64(3), 1, 4],
        np.array([[3, 1, 4]]),
        [[3, 1, 4]],
        [tg.Tensor(np.array([3, 1, 4]))],
    ],
    ids=str,
)
def test_a_prompt_may_be_any_sequence_of_integers(model, prompt):
    np.testing.assert_array_equal(generate(model, prompt, 5, temperature=0)[0], naive(model, [3, 1, 4], 5))


def test_the_prompt_is_neither_changed_nor_shared(model):
    prompt = np.array([[3, 1, 4]])
    for n in (0, 3):
        ids = generate(model, prompt, n, temperature=0)
        np.testing.assert_array_equal(prompt, [[3, 1, 4]])
        assert not np.shares_memory(ids, prompt)


# ------------------------------------------------------------------------------------------------------------- stopping


def test_rows_stop_independently_and_equal_their_prompt_alone(model):
    prompts = prompts_of([4, 2, 6, 1, 3], seed=3)
    whole = [naive(model, prompt, 7) for prompt in prompts]
    stop = int(whole[1][4])
    ids, logs = generate(model, prompts, 7, temperature=0, stop=stop, logprobs=True)
    lengths = set()
    for row, log, prompt, expected in zip(ids, logs, prompts, whole, strict=True):
        found = np.flatnonzero(expected[len(prompt) :] == stop)
        n = found[0] + 1 if len(found) else 7
        np.testing.assert_array_equal(row, expected[: len(prompt) + n])
        np.testing.assert_array_equal(row, generate(model, prompt, 7, temperature=0, stop=stop)[0])
        assert len(log) == n
        lengths.add(n)
    assert len(lengths) > 1
    assert min(lengths) < 7


def test_a_stopped_row_is_not_computed_any_more(model, monkeypatch):
    prompts = prompts_of([4, 4, 4], seed=3)
    whole = [naive(model, prompt, 9)[4:] for prompt in prompts]
    stops = [int(new[i]) for new, i in zip(whole, [1, 3, 6], strict=True)]
    counts = [int(np.isin(new, stops).argmax()) + 1 for new in whole]
    sizes = []
    forward = tg.nn.GPT.forward
    monkeypatch.setattr(
        tg.nn.GPT, "forward", lambda self, idx, **options: sizes.append(len(idx)) or forward(self, idx, **options)
    )
    ids = generate(model, prompts, 9, temperature=0, stop=stops)
    assert [len(row) - 4 for row in ids] == counts
    assert sizes == [sum(count > step for count in counts) for step in range(max(counts))]
    assert len(set(counts)) > 1


def test_a_stop_token_in_the_prompt_stops_nothing():
    script = [3, 0, 3, 1, 2, 0, 4, 4]
    model = Scripted(script, vocab_size=5)
    np.testing.assert_array_equal(generate(model, [3, 0, 3], 5, temperature=0, stop=0), [[3, 0, 3, 1, 2, 0]])
    np.testing.assert_array_equal(generate(model, [3, 0, 3], 5, temperature=0), [script])
    np.testing.assert_array_equal(generate(model, [3, 0, 3], 5, temperature=0, stop=[]), [script])
    np.testing.assert_array_equal(generate(model, [3, 0, 3], 5, temperature=0, stop=[0, 2]), [[3, 0, 3, 1, 2]])
    np.testing.assert_array_equal(generate(model, [3], 5, temperature=0, stop=np.array([0])), [[3, 0]])


def test_an_end_of_the_model_may_be_the_first_id():
    model = Scripted([3, 1, 2, 0, 4], vocab_size=5)
    model.end_ids = (0, 5)  # the second is not in the vocabulary
    np.testing.assert_array_equal(generate(model, [3], 4, temperature=0), [[3, 1, 2, 0]])


@pytest.mark.parametrize("stop", ["cd", ["zz", "cd"], ["cdc", "d", "b"], "abcabcd"])
def test_a_row_stops_at_the_token_that_completes_a_string(stop):
    tokenizer = CharTokenizer("abcdz")
    text = "cdabcabcdcd"  # the prompt, its first two characters, is a stop string
    model = Scripted(tokenizer.encode(text), vocab_size=5)
    ids = generate(model, tokenizer.encode("cd"), 9, temperature=0, stop=stop, tokenizer=tokenizer)
    strings = [stop] if isinstance(stop, str) else stop
    expected = next(text[:n] for n in range(3, 12) if any(s in text[2:n] for s in strings))
    assert tokenizer.decode(ids[0]) == expected
    assert "".join(stream(model, tokenizer.encode("cd"), 9, 0, stop=stop, tokenizer=tokenizer)) == expected[2:]


def test_a_stop_string_must_be_entirely_in_the_new_text():
    tokenizer = CharTokenizer("ab")
    model = Scripted(tokenizer.encode("abbabb"), vocab_size=2)
    ids = generate(model, tokenizer.encode("ab"), 4, temperature=0, stop="bb", tokenizer=tokenizer)
    assert tokenizer.decode(ids[0]) == "abbabb"  # not "abb", whose first b is in the prompt


def test_ids_and_strings_can_be_combined():
    tokenizer = CharTokenizer("abc")
    model = Scripted(tokenizer.encode("aabcabc"), vocab_size=3)
    for stop, expected in [(["ca", 1], "aab"), (["bc", 0], "aa"), (("b", 2), "aab")]:
        ids = generate(model, tokenizer.encode("a"), 6, temperature=0, stop=stop, tokenizer=tokenizer)
        assert tokenizer.decode(ids[0]) == expected


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ("b", ValueError, "pass tokenizer="),
        (VOCABULARY, ValueError, "not in the vocabulary, 0 to 28"),
        (-1, ValueError, "not in the vocabulary"),
        (1.0, TypeError, "token id, a string, or a list"),
        ([[1, 2]], TypeError, "token id, a string, or a list"),
    ],
)
def test_an_invalid_stop_is_refused(model, stop, error, message):
    with pytest.raises(error, match=message):
        generate(model, [1], 3, stop=stop)


@pytest.mark.parametrize(("stop", "message"), [("", "empty string"), ("x", "'x'.*not in the vocabulary")])
def test_a_stop_string_that_cannot_be_encoded_is_refused(model, stop, message):
    with pytest.raises(ValueError, match=message):
        generate(model, [1], 3, stop=stop, tokenizer=CharTokenizer("abc"))


# --------------------------------------------------------------------------------------------------- length and context


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("new", [0, 1, 3, 5, np.int64(2)])
def test_max_new_tokens_is_the_number_of_new_tokens(model, new, use_cache):
    prompt = [5, 4, 3, 2, 1]
    np.testing.assert_array_equal(
        generate(model, prompt, new, temperature=0, use_cache=use_cache), [naive(model, prompt, new)]
    )
    assert len(list(stream(model, prompt, new, use_cache=use_cache))) == new


@pytest.mark.parametrize("new", [-1, 2.0, True, None, "3"])
def test_an_invalid_max_new_tokens_is_refused(model, new):
    with pytest.raises(ValueError, match="max_new_tokens must be an integer of at least 0"):
        generate(model, [1], new)


@pytest.mark.parametrize("length", [1, 7, BLOCK])
def test_prompt_and_new_tokens_may_exceed_the_context_by_one(model, length):
    (prompt,) = prompts_of([length])
    assert generate(model, prompt, BLOCK + 1 - length).shape == (1, BLOCK + 1)


@pytest.mark.parametrize(("length", "new"), [(1, BLOCK + 1), (7, 8), (BLOCK, 2), (BLOCK + 1, 1), (30, 1)])
def test_a_full_context_raises_before_the_model_is_called(model, monkeypatch, length, new):
    monkeypatch.setattr(tg.nn.GPT, "forward", None)
    (prompt,) = prompts_of([length])
    for call in (generate, stream):
        with pytest.raises(ValueError, match=rf"prompt of {length} and {new} new .*block_size is {BLOCK}.*slide"):
            call(model, prompt, new)


def test_a_long_prompt_is_returned_if_no_new_token_is_requested(model):
    (prompt,) = prompts_of([30])
    np.testing.assert_array_equal(generate(model, prompt, 0), [prompt])


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [1, BLOCK - 2, BLOCK, BLOCK + 1, 30])
def test_sliding_reads_the_last_block_size_tokens(position, use_cache, length):
    model = make_model(position)
    (prompt,) = prompts_of([length])
    new = BLOCK + 7
    with pytest.warns(ContextFullWarning, match=f"each new token reads the last {BLOCK} again"):
        ids = generate(model, prompt, new, temperature=0, use_cache=use_cache, on_full="slide")
    np.testing.assert_array_equal(ids, [naive(model, prompt, new)])


@pytest.mark.filterwarnings("ignore::tinygrad_mha.decoding.ContextFullWarning")
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_each_row_of_a_sliding_batch_equals_its_prompt_alone(position, use_cache):
    model = make_model(position)
    prompts = prompts_of([5, 1, 30, BLOCK, 2])
    stop = int(naive(model, prompts[1], BLOCK + 1)[-1])
    ids = generate(model, prompts, BLOCK + 7, temperature=0, use_cache=use_cache, on_full="slide", stop=stop)
    for row, prompt in zip(ids, prompts, strict=True):
        new = len(row) - len(prompt)
        np.testing.assert_array_equal(row, naive(model, prompt, new))
        assert new == BLOCK + 7 or row[-1] == stop
    assert len({len(row) - len(prompt) for row, prompt in zip(ids, prompts, strict=True)}) > 1


def test_sliding_warns_at_the_line_of_the_call_and_only_if_the_context_is_full(model):
    for call in (generate, stream):
        with pytest.warns(ContextFullWarning) as notes:
            call(model, [1], BLOCK + 1, on_full="slide")
        assert [note.filename for note in notes] == [__file__]
        call(model, [1], BLOCK, on_full="slide")  # a warning would be an error


def test_an_unknown_on_full_is_refused(model):
    with pytest.raises(ValueError, match="on_full must be one of 'error', 'slide', got 'crop'"):
        generate(model, [1], 1, on_full="crop")


# ------------------------------------------------------------------------------------------------------ invalid prompts


@pytest.mark.parametrize("idx", [[], np.zeros((1, 0), int), np.zeros(0), [[]], [[1, 2], []]], ids=str)
def test_an_empty_prompt_is_refused(model, idx):
    with pytest.raises(ValueError, match=r"prompt \d is empty.*start token"):
        generate(model, idx, 3)


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        ("", TypeError, "text, encode it first"),
        ("abc", TypeError, "text, encode it first"),
        (None, TypeError, "NoneType"),
        (3, TypeError, "token ids"),
        ([1.0, 2.0], TypeError, "must be integers, got float64"),
        (np.array([True, False]), TypeError, "must be integers, got bool"),
        (["a", "b"], TypeError, "must be integers"),
        (np.zeros((2, 3, 5), int), ValueError, r"shape \(2, 3, 5\)"),
        (np.array(3), ValueError, r"shape \(\)"),
        (np.zeros((0, 5), int), ValueError, r"shape \(0, 5\)"),
        ([[[1, 2]]], ValueError, r"row 0 of shape \(1, 2\)"),
        ([[1, 2], 3], ValueError, r"row 1 of shape \(\)"),
        ([1, 2, VOCABULARY], IndexError, r"idx\[2\] is 29, expected 0 to 28"),
        ([-1], IndexError, r"idx\[0\] is -1, expected 0 to 28"),
        ([[1, 2], [3, 99, 1]], IndexError, r"idx\[1\]\[1\] is 99, expected 0 to 28"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("new", [0, 3])
def test_an_invalid_prompt_is_refused(model, idx, error, message, new):
    for call in (generate, stream):
        with pytest.raises(error, match=message):
            call(model, idx, new)


def test_logits_that_are_nan_are_refused():
    model = make_model()
    model.lm_head.weight.assign_(np.full(model.lm_head.weight.shape, np.nan))
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="logits are nan or infinite"):
            generate(model, [1], 3, temperature=temperature)


# ----------------------------------------------------------------------------------------------------------------- seed


def test_a_seed_draws_the_same_tokens_independently_of_numpys_generator(model):
    def drawn(seed):
        np.random.rand(3)
        return generate(model, [[1, 2], [3, 4]], 10, temperature=1.5, seed=seed).tolist()

    assert drawn(0) == drawn(0)
    assert drawn(42) == drawn(42)
    assert drawn(0) != drawn(42)
    assert drawn(None) != drawn(None)


def test_the_global_generator_is_not_used(model):
    np.random.seed(7)
    before = np.random.get_state()[1:3]
    generate(model, [1, 2], 5, seed=3)
    generate(model, [1, 2], 5)
    after = np.random.get_state()[1:3]
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]


def test_equal_prompts_of_a_batch_draw_differently(model):
    a, b, c = generate(model, [[1, 2]] * 3, 10, temperature=2.0, seed=0).tolist()
    assert a != b != c != a


def test_the_draws_of_a_row_do_not_depend_on_the_rows_after_it(model):
    prompts = prompts_of([3, 5, 2])
    three = generate(model, prompts, 6, temperature=2.0, seed=11)
    two = generate(model, prompts[:2], 6, temperature=2.0, seed=11)
    one = generate(model, prompts[0], 6, temperature=2.0, seed=11)
    np.testing.assert_array_equal(three[0], two[0])
    np.testing.assert_array_equal(three[1], two[1])
    np.testing.assert_array_equal(three[0], one[0])


def test_tokens_are_drawn_with_the_probabilities_of_the_model(model):
    n = 4000
    drawn = generate(model, [[3, 1]] * n, 1, temperature=2.0, top_k=5, seed=0)[:, 2]
    with tg.no_grad():
        logits = model([3, 1]).numpy()[-1] / 2.0
    kept = np.argsort(logits)[-5:]
    p = np.zeros(VOCABULARY)
    p[kept] = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
    counts = np.bincount(drawn, minlength=VOCABULARY)
    assert (counts[p == 0] == 0).all()
    assert (np.abs(counts - n * p) <= 4 * np.sqrt(n * p * (1 - p))).all()


def test_cached_draws_equal_uncached_ones(model):
    options = {"temperature": 1.3, "top_k": 11, "top_p": 0.9, "seed": 5, "logprobs": True}
    cached, logs = generate(model, [[1, 2, 3]] * 7, 10, **options)
    again, logs_again = generate(model, [[1, 2, 3]] * 7, 10, use_cache=False, **options)
    np.testing.assert_array_equal(cached, again)
    np.testing.assert_allclose(logs, logs_again, rtol=0, atol=1e-12)


def test_log_probabilities_are_those_before_temperature_top_k_and_top_p(model):
    prompt = [3, 1, 4]
    ids, logs = generate(model, prompt, 8, temperature=0.5, top_k=3, top_p=0.8, seed=1, logprobs=True)
    with tg.no_grad():
        full = tg.ops.log_softmax(model(ids[:, :-1]).numpy()[0, 2:])
    np.testing.assert_allclose(logs[0], full[np.arange(8), ids[0, 3:]], rtol=0, atol=1e-12)
    assert logs.shape == (1, 8)
    assert generate(model, prompt, 0, logprobs=True)[1].shape == (1, 0)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 1.5}], ids=str)
def test_options_are_checked_at_the_call_even_if_nothing_is_drawn(model, options):
    for call in (generate, stream):
        with pytest.raises(ValueError, match=next(iter(options))):
            call(model, [1], 0, **options)


# -------------------------------------------------------------------------------------------------- modes of the caller


def modes(model):
    return [module.training for _, module in model.named_modules()]


def test_a_model_left_in_train_mode_generates_without_dropout_and_stays_in_it():
    model = make_model(dropout=0.5)
    expected = naive(model, [1, 2], 9)
    model.train()
    model.h[1].eval()
    before = modes(model)
    assert True in before
    assert False in before
    generators = {name: rng.bit_generator.state for name, rng in model.generators().items()}
    for use_cache in (True, False):
        np.testing.assert_array_equal(generate(model, [1, 2], 9, temperature=0, use_cache=use_cache), [expected])
    assert modes(model) == before
    for token, wanted in zip(stream(model, [1, 2], 9, temperature=0), expected[2:], strict=True):
        assert token == wanted
        assert modes(model) == before
    assert generators == {name: rng.bit_generator.state for name, rng in model.generators().items()}


def test_the_mode_is_restored_after_an_exception(monkeypatch):
    model = make_model(dropout=0.5).train()

    def fails(self, x):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(tg.nn.FeedForward, "forward", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(model, [1, 2], 3)
    assert all(modes(model))
    assert tg.is_grad_enabled()


def test_code_between_tokens_records_gradients(model):
    x = tg.Tensor(3.0, requires_grad=True)
    tokens = stream(model, [1, 2], 5)
    seen = []
    for token in tokens:
        assert tg.is_grad_enabled()
        y = x * x
        y.backward()
        seen.append(token)
    assert len(seen) == 5
    assert x.grad == 5 * 6.0


def test_the_gradient_mode_of_the_caller_holds_between_tokens(model):
    tokens = stream(model, [1, 2], 5)
    with tg.no_grad():
        next(tokens)
        assert not tg.is_grad_enabled()
    next(tokens)
    assert tg.is_grad_enabled()


def test_closing_a_stream_early_restores_everything():
    model = make_model(dropout=0.5).train()
    tokens = stream(model, [1, 2], 5)
    next(tokens)
    tokens.close()
    assert tg.is_grad_enabled()
    assert all(modes(model))
    assert list(tokens) == []


def test_generation_leaves_no_graph_and_no_gradient():
    model = make_model()
    generate(model, [1, 2], 5)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.loss([1, 2], [2, 3]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --------------------------------------------------------------------------------------------------------------- stream


def test_a_stream_yields_the_tokens_of_generate(model):
    options = {"temperature": 1.2, "top_k": 9, "seed": 3}
    (ids,) = generate(model, [1, 2, 3], 8, **options)
    tokens = list(stream(model, [1, 2, 3], 8, **options))
    assert tokens == ids[3:].tolist()
    assert {type(token) for token in tokens} == {int}


def test_a_stream_of_several_prompts_yields_minus_one_for_stopped_rows(model):
    prompts = prompts_of([4, 2, 6], seed=3)
    stop = int(naive(model, prompts[1], 3)[-1])
    rows = np.stack(list(stream(model, prompts, 7, temperature=0, stop=stop)), axis=1)
    ids = generate(model, prompts, 7, temperature=0, stop=stop)
    assert (rows == -1).any()
    for row, prompt, expected in zip(rows, prompts, ids, strict=True):
        np.testing.assert_array_equal(row[row >= 0], expected[len(prompt) :])
        assert (np.diff((row >= 0).astype(int)) <= 0).all()  # -1 only at the end


def test_a_stream_computes_nothing_before_the_first_token_is_requested(model, monkeypatch):
    tokens = stream(model, [1, 2], 5, temperature=0)
    monkeypatch.setattr(tg.nn.GPT, "forward", None)
    with pytest.raises(TypeError):
        next(tokens)


BYTES = BPETokenizer({symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}, [])


@pytest.mark.parametrize("prompt_bytes", [1, 2, 3])
def test_a_stream_of_text_never_cuts_a_character(prompt_bytes):
    text = "aß地😀z"
    script = BYTES.encode(text)
    model = Scripted(script, vocab_size=256)
    pieces = list(stream(model, script[:prompt_bytes], len(script) - prompt_bytes, 0, tokenizer=BYTES))
    assert len(pieces) == len(script) - prompt_bytes  # one per token
    # a character that begins in the prompt is yielded as a whole
    assert "".join(pieces) == {1: "ß地😀z", 2: "ß地😀z", 3: "地😀z"}[prompt_bytes]
    assert {len(piece) for piece in pieces} == {0, 1}


def test_a_character_that_stays_incomplete_is_replaced_at_the_end():
    script = BYTES.encode("a地b")
    pieces = list(stream(Scripted(script, vocab_size=256), script[:1], 2, 0, tokenizer=BYTES))
    assert pieces == ["", "\ufffd"]


def test_a_stop_string_may_end_inside_a_token_and_begin_in_another():
    vocab = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)} | {"ab": 256, "cd": 257}
    tokenizer = BPETokenizer(vocab, [("a", "b"), ("c", "d")])
    script = tokenizer.encode("ababcdab")
    assert script.tolist() == [256, 256, 257, 256]
    ids = generate(Scripted(script, 258), script[:1], 3, temperature=0, stop="bc", tokenizer=tokenizer)
    assert tokenizer.decode(ids[0]) == "ababcd"


def test_a_stream_of_several_texts_yields_one_piece_for_each():
    model = make_model()
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyzäöü")
    prompts = prompts_of([4, 2, 6], seed=3)
    stop = tokenizer.characters[naive(model, prompts[1], 3)[-1]]
    columns = list(stream(model, prompts, 7, temperature=0, stop=stop, tokenizer=tokenizer))
    ids = generate(model, prompts, 7, temperature=0, stop=stop, tokenizer=tokenizer)
    assert {len(column) for column in columns} == {3}
    for row, prompt, pieces in zip(ids, prompts, zip(*columns, strict=True), strict=True):
        assert "".join(pieces) == tokenizer.decode(row[len(prompt) :])


# ----------------------------------------------------------------------------------------------------------------- beam


def every_text(n, vocab_size, ends):
    """All texts of up to n tokens: those that have ended (for the first time), and those of n tokens."""
    for length in range(1, n + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            if not any(ends(text[:k]) for k in range(1, length)) and (length == n or ends(text)):
                yield text


STOPS = {
    "an id": (0, lambda text: text[-1] == 0),
    "a string": ("ba", lambda text: text[-2:] == (1, 0)),
    "both": (["ba", 2], lambda text: text[-2:] == (1, 0) or text[-1] == 2),
    "none": (None, lambda text: False),
}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length_penalty", [0.0, 0.9])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_as_wide_as_the_number_of_texts_finds_the_best_of_all(seed, stop, length_penalty, use_cache):
    rng = np.random.default_rng(seed)
    model = tg.nn.GPT(tg.nn.GPTConfig(3, 7, 2, 2, 10, tie_weights=False), seed=seed).astype(np.float64)
    for parameter in model.parameters():
        parameter.assign_(rng.standard_normal(parameter.shape))
    prompt = [1, 2]
    stops, ends = STOPS[stop]

    def log_probabilities(text):
        with tg.no_grad():
            log = tg.ops.log_softmax(model([*prompt, *text[:-1]]).numpy()[1:])
        return log[np.arange(len(text)), list(text)]

    def score(text):
        return log_probabilities(text).sum() / ((5 + len(text)) / 6) ** length_penalty

    best = max(every_text(4, 3, ends), key=score)
    options = {"beam": 3**4, "length_penalty": length_penalty, "use_cache": use_cache, "logprobs": True}
    ids, logs = generate(model, prompt, 4, stop=stops, tokenizer=CharTokenizer("abc"), **options)
    np.testing.assert_array_equal(ids, [[*prompt, *best]])
    np.testing.assert_allclose(logs[0], log_probabilities(best), rtol=0, atol=1e-12)


def test_a_wide_beam_finds_a_more_probable_text_than_greedy_decoding(model):
    gains = []
    for prompt in prompts_of([3] * 7, seed=2):
        _, greedy = generate(model, prompt, 5, temperature=0, logprobs=True)
        _, found = generate(model, prompt, 5, beam=200, logprobs=True)
        gains.append(found.sum() - greedy.sum())
    assert min(gains) >= -1e-9
    assert max(gains) > 0.1


def test_the_beam_of_a_row_equals_that_of_its_prompt_alone(model):
    prompts = prompts_of([4, 2, 6])
    for row, prompt in zip(generate(model, prompts, 5, beam=3, stop=[3, 20]), prompts, strict=True):
        np.testing.assert_array_equal(row, generate(model, prompt, 5, beam=3, stop=[3, 20], use_cache=False)[0])


@pytest.mark.filterwarnings("ignore::tinygrad_mha.decoding.ContextFullWarning")
def test_a_beam_slides_when_the_context_is_full(model):
    (prompt,) = prompts_of([BLOCK - 1])
    cached, uncached = (generate(model, prompt, 5, beam=3, use_cache=use, on_full="slide") for use in (True, False))
    np.testing.assert_array_equal(cached, uncached)
    assert cached.shape == (1, BLOCK + 4)


def test_a_beam_stops_at_a_string():
    tokenizer = CharTokenizer("abcd")
    script = tokenizer.encode("abcabcd")
    ids = generate(Scripted(script, 4), script[:1], 6, beam=2, use_cache=False, stop="cab", tokenizer=tokenizer)
    assert tokenizer.decode(ids[0]) == "abcab"


def test_a_beam_adds_nothing_if_no_new_token_is_requested(model):
    ids, logs = generate(model, [1, 2], 0, beam=3, logprobs=True)
    np.testing.assert_array_equal(ids, [[1, 2]])
    assert logs.shape == (1, 0)


@pytest.mark.parametrize("beam", [0, -1, 1.5, True, None])
def test_an_invalid_beam_is_refused(model, beam):
    with pytest.raises(ValueError, match="beam must be an integer of at least 1"):
        generate(model, [1], 3, beam=beam)


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_a_beam_cannot_be_combined_with_sampling(model, options):
    with pytest.raises(ValueError, match="a beam search draws nothing"):
        generate(model, [1], 3, beam=2, **options)


# ----------------------------------------------------------------------------------------------------------------- cost


def cost(model, prompt, new, use_cache=True):
    counted = CountedModel(model)
    generate(counted, np.zeros(prompt, int), new, use_cache=use_cache, on_full="slide")
    return counted.multiply_adds


@pytest.mark.filterwarnings("ignore::tinygrad_mha.decoding.ContextFullWarning")
def test_multiply_adds_of_a_small_model_by_hand():
    config = tg.nn.GPTConfig(vocab_size=11, block_size=3, n_layer=1, n_head=1, n_embd=2, n_inner=5)
    model = tg.nn.GPT(config)
    # per token: 2*6 for Q, K and V, 2*2 for W_O, 2*5 + 5*2 for the mlp = 36; per pair of tokens: 2 + 2; head: 2*11 = 22
    assert cost(model, 1, 1) == 36 + 4 + 22
    assert cost(model, 2, 1) == 2 * 36 + 4 * 4 + 22
    assert cost(model, 2, 2) == (2 * 36 + 4 * 4 + 22) + (36 + 3 * 4 + 22)
    assert cost(model, 2, 2, use_cache=False) == (2 * 36 + 4 * 4 + 22) + (3 * 36 + 9 * 4 + 22)
    assert cost(model, 2, 3) == cost(model, 2, 2) + (3 * 36 + 9 * 4 + 22)  # a full context
    assert cost(model, 2, 0) == 0


@pytest.mark.filterwarnings("ignore::tinygrad_mha.decoding.ContextFullWarning")
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (5, 7), (BLOCK, 1), (7, 11), (17, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_head": 1, "position": "rotary", "n_inner": 7},
        {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_inner": 7},
        {"norm_first": False, "position": "relative"},
    ],
    ids=["gpt2", "grouped", "llama", "gpt1"],
)
def test_counted_multiply_adds_are_those_of_the_arrays_that_were_multiplied(
    monkeypatch, options, prompt, new, use_cache
):
    model = make_model(**options)
    counted = cost(model, prompt, new, use_cache)
    done = []

    def watch(op, count):
        forward = op.forward

        def watched(*arrays, **kwargs):
            done.append(count(*arrays))
            return forward(*arrays, **kwargs)

        monkeypatch.setattr(op, "forward", watched)

    watch(tg.ops.linear, lambda x, w, *bias: x.size * w.shape[1])
    watch(tg.ops.matmul, lambda a, b: a.size * b.shape[-1])
    watch(tg.ops.attention, lambda q, k, v, *rest: k.shape[-2] * q.size + k.shape[-2] * q[..., 0].size * v.shape[-1])
    watch(tg.ops.self_attention, lambda qkv, *rest: 2 * qkv.size // 3 * qkv.shape[-2])
    generate(model, prompts_of([prompt])[0], new, use_cache=use_cache, on_full="slide")
    assert sum(done) == counted


def test_a_counted_model_generates_what_the_model_generates(model):
    prompts = prompts_of([5, 3])
    for options in ({"temperature": 0}, {"seed": 3}, {"beam": 3}, {"use_cache": False, "seed": 3}):
        expected = generate(model, prompts, 4, **options)
        for row, wanted in zip(generate(CountedModel(model), prompts, 4, **options), expected, strict=True):
            np.testing.assert_array_equal(row, wanted)


def test_multiply_adds_of_products_of_every_kind(rng):
    a, b, c = (tg.Tensor(rng.standard_normal(shape)) for shape in [(2, 3, 5), (5, 7), (2, 7, 11)])
    with tg.record():
        assert count_multiply_adds(a @ b) == 2 * 3 * 5 * 7
        assert count_multiply_adds(a @ b @ c) == 2 * 3 * 5 * 7 + 2 * 3 * 7 * 11
        assert count_multiply_adds(tg.ops.linear(a, b)) == 2 * 3 * 5 * 7
        assert count_multiply_adds(tg.ops.einsum("bij,jk->bik", a, b)) == 2 * 3 * 5 * 7
        assert count_multiply_adds(tg.ops.einsum("...ij,jk->...ki", a, b)) == 2 * 3 * 5 * 7
        assert count_multiply_adds(tg.ops.einsum("bij->j", a)) == 0
        assert count_multiply_adds((a * 2).tanh().sum()) == 0


def test_multiply_adds_of_a_gated_feed_forward_part(rng):
    """x (3, 5) through two matrices (5, 7), one of which gates the other, and back: 3 * 5 * 7 three times."""
    x, gate, up, down = (tg.Tensor(rng.standard_normal(shape)) for shape in [(3, 5), (5, 7), (5, 7), (7, 5)])
    with tg.record():
        y = (tg.ops.sigmoid(x @ gate) * (x @ up)) @ down
    assert count_multiply_adds(y) == 3 * 3 * 5 * 7


def test_a_users_fused_primitive_is_counted_by_its_composition(own_primitives, rng):
    @tg.ops.primitive
    def two_products(x, v, w):
        return x @ v @ w

    two_products.composed_of(lambda x, v, w: x @ v @ w)
    x, v, w = (tg.Tensor(rng.standard_normal(shape)) for shape in [(3, 5), (5, 7), (7, 11)])
    with tg.record():
        assert count_multiply_adds(two_products(x, v, w)) == 3 * 5 * 7 + 3 * 7 * 11


def test_an_unknown_option_of_stream_is_refused_by_its_own_name(model):
    with pytest.raises(TypeError, match=r"stream\(\) has no option 'beam', 'topk'; its options are top_k, top_p"):
        stream(model, [1], 3, topk=2, beam=2)


# --------------------------------------------------------------------------------------------------------------------
# The twin on arrays, which generate calls

KINDS = {
    "gpt2": {},
    "gpt1": {"norm_first": False},
    "llama": {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 2},
    "mistral": {"position": "rotary", "n_kv_head": 2, "window": 3},
    "sinusoidal": {"position": "sinusoidal", "activation": "gelu", "tie_weights": False},
    "alibi": {"position": "alibi", "activation": "relu"},
    "relative": {"position": "relative", "n_kv_head": 1},
    "softcap": {"score": "softcap"},
    "sinks": {"score": "sinks", "position": "rotary"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_twin_on_arrays_computes_what_the_model_computes_in_eval_mode(kind, dropout):
    config = tg.nn.GPTConfig(11, 13, n_layer=2, n_head=4, n_embd=24, dropout=dropout, **KINDS[kind])
    model = tg.nn.GPT(config, seed=0).astype(np.float64)
    for parameter in model.parameters():
        parameter.assign_(np.random.default_rng(0).standard_normal(parameter.shape) / 3)
    twin = model.copy_on_arrays()
    rows = {"positions": np.array([[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]])}
    allow = np.array([[False, True, True, True, True, True], [True] * 6])
    idx = np.random.default_rng(1).integers(11, size=(2, 6))
    caches = [tg.nn.KVCache(2), tg.nn.KVCache(2)]
    with model.evaluating(), tg.no_grad():
        for columns in (slice(0, 4), slice(4, 5), slice(5, 6)):
            options = {"positions": rows["positions"][:, columns], "key_allow": allow[:, : columns.stop]}
            expected = model(idx[:, columns], cache=caches[0], **options)
            got = twin(idx[:, columns], cache=caches[1], **options)
            assert isinstance(got, np.ndarray)
            np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)
        np.testing.assert_allclose(twin(idx[0]), model(idx[0]).numpy(), rtol=1e-12)
    assert model.training  # the twin has a mode of its own


def test_the_twin_sees_what_is_assigned_to_the_parameters_afterwards():
    model = make_model()
    twin = model.copy_on_arrays()
    model.wte.weight.assign_(model.wte.weight.numpy()[::-1].copy())
    np.testing.assert_array_equal(twin([[3, 1, 4]]), model([[3, 1, 4]]).numpy())


def test_a_stream_copies_its_model_once_however_often_tensors_are_written_to(monkeypatch):
    model, copies = make_model(), []
    copy = model.copy_on_arrays
    monkeypatch.setattr(type(model), "copy_on_arrays", lambda self: copies.append(1) or copy())
    for _ in stream(model, [3, 1, 4], 6, temperature=0):
        model.wte.weight.assign_(model.wte.weight.numpy())
    assert len(copies) == 1


def test_a_stream_without_cache_continues_in_the_dtype_to_which_the_model_is_converted():
    model, prompt = make_model(), [3, 1, 4]
    tokens = stream(model, prompt, 6, temperature=0, use_cache=False)
    first = [next(tokens) for _ in range(2)]
    model.astype(np.float32)
    model.lm_head.weight.assign_(model.lm_head.weight.numpy()[::-1].copy())
    assert list(tokens) == naive(model, prompt + first, 4)[5:].tolist()


def test_a_stream_whose_model_is_converted_refuses_the_keys_of_the_other_dtype():
    model = make_model()
    tokens = stream(model, [3, 1, 4], 6, temperature=0)
    next(tokens)
    model.astype(np.float32)
    with pytest.raises(ValueError, match=r"the cache holds k .* float64 .* got .* float32: use a new cache"):
        next(tokens)


@pytest.mark.parametrize("position", ["learned", "rotary", "relative"])
def test_two_threads_generate_with_one_model_what_one_thread_does(position):
    model = make_model(position).train()
    prompts = prompts_of([3, 5, 2, 4], seed=1)
    expected = [generate(model, prompt, 8, temperature=0) for prompt in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads alternate inside of a token
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda prompt: generate(model, prompt, 8, temperature=0), prompts * 5))
    finally:
        sys.setswitchinterval(interval)
    np.testing.assert_array_equal(np.concatenate([row[:, -8:] for row in found]), [row[0, -8:] for row in expected * 5])
    assert model.training


def test_a_model_with_a_module_of_another_kind_is_its_own_twin():
    class Doubled(tg.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 2

    model = make_model()
    model.ln_f = Doubled(model.config.n_embd)
    assert model.copy_on_arrays() is model
    model = make_model()
    model.h[0].mlp.forward = lambda x: x * 0
    assert model.copy_on_arrays() is model


def test_generation_that_is_recorded_is_recorded_whole():
    model, seen = make_model(), []

    class Observer:
        def applied(self, op, inputs, out):
            seen.append(op.name)

    token = STATE.set(STATE.get()._replace(observer=Observer()))
    try:
        tg.generate(model, [3, 1], 2, temperature=0)
    finally:
        STATE.reset(token)
    assert seen.count("layer_norm") == 2 * (2 * model.config.n_layer + 1)
