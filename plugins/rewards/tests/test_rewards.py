"""The functions alone, against values worked out by hand."""

import dataclasses

import pytest

from engine_core.rewards.signatures import RewardFunction, arguments
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_rewards.mathematics import same_mathematics
from engine_plugin_rewards.numeric import last_boxed, last_number, numeric
from engine_plugin_rewards.plugin import FormatOptions, LengthOptions, PythonOptions
from engine_plugin_rewards.python_file import as_conversations
from engine_plugin_rewards.text import exact_match, make_format, soft_overlong

TWO_TOLERANCES = {"tolerance": 0.5, "relative_tolerance": 0.01}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]


def rollout_of(prompt, **columns):
    request = Request("0", Prompt("train:0", [1], prompt, columns), Sampling())
    return dataclasses.replace(request.unsampled(), text="a")


def score(given):
    return None if given is None else given["score"]


def match(completion, answer, **options):
    defaults = {"after": None, "ignore_case": False, "strip": True}
    return score(exact_match(completion, answer, **defaults | options))


def number(completion, answer, **options):
    defaults = {"tolerance": 1e-6, "relative_tolerance": 0.0, "boxed": "prefer"}
    return score(numeric(completion, answer, **defaults | options))


def same(completion, answer, **options):
    return score(same_mathematics(completion, answer, **{"precision": 6, "strict": True} | options))


@pytest.mark.parametrize(
    ("completion", "answer", "options", "value"),
    [
        (" 4\n", "4", {}, 1.0),
        (" 4\n", "4", {"strip": False}, 0.0),
        ("4", 4, {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("STRASSE", "stra\u00dfe", {"ignore_case": True}, 1.0),
        ("2, so Answer: 3. No, Answer: 4", "4", {"after": "Answer:"}, 1.0),
        ("4", "4", {"after": "Answer:"}, 0.0),
        ("", "", {}, 1.0),
        ("4", None, {}, None),
    ],
)
def test_exact_match(completion, answer, options, value):
    assert match(completion, answer, **options) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 and 34", 34),
        ("1,234,567.5 kg", 1234567.5),
        ("1,23", 23),
        ("10-12", 12),
        ("5 - 2 = 3", 3),
        ("it is -5", -5),
        ("(-3)", -3),
        ("\u22127", -7),
        ("- 5", 5),  # an item of a list
        ("$-1,200", -1200),
        ("-$5", -5),
        ("-.5", -0.5),
        ("42.", 42),
        ("1e3", 1000),
        ("3/4", 0.75),
        (r"\frac{3}{4}", 0.75),
        (r"-\dfrac{1}{2}", -0.5),
        ("10/0", None),
        ("1 then 10/0", 1),
        ("#### 72", 72),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, value):
    found = last_number(text)
    assert found is None if value is None else float(found) == value


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("1", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_of_a_text(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("completion", "answer", "options", "value"),
    [
        ("So it is 72 apples.", "48 + 24 = 72\n#### 72", {}, 1.0),
        ("72 or 73", 72, {}, 0.0),
        ("1000001", 1000002, {}, 0.0),
        ("3.14", 3.14159, {"tolerance": 0.01}, 1.0),
        ("3.14", 3.14159, {}, 0.0),
        ("99", 100, {"relative_tolerance": 0.01}, 1.0),
        (r"\boxed{5}, checked in 3 ways", 5, {}, 1.0),
        (r"\boxed{5}, checked in 3 ways", 5, {"boxed": "ignore"}, 0.0),
        ("5", 5, {"boxed": "only"}, 0.0),
        (r"\boxed{x} is 5", 5, {}, 1.0),
        ("9" * 5000, "9" * 5000, {}, 1.0),
        (r"\boxed{1{,}234}", 1234, {}, 1.0),
        (r"\boxed{1\,234\,567}", 1234567, {}, 1.0),
        (r"10,\!000", "10{,}000", {}, 1.0),
        (r"(1\,2345)", 2345, {}, 1.0),
        (r"5 or \boxed{4}, not 3", 4, {"boxed": "only"}, 1.0),
        (r"\boxed{4} or \boxed{5}", 4, {"boxed": "only"}, 0.0),
        (r"It is 4. \boxed{unknown}", 4, {"boxed": "only"}, 0.0),
        (r"\boxed{3}, so 4", 4, {"boxed": "ignore"}, 1.0),
        ("126.2", 125, TWO_TOLERANCES, 1.0),  # the larger one counts, not the sum
        ("126.4", 125, TWO_TOLERANCES, 0.0),
        ("4.5", 4, TWO_TOLERANCES, 1.0),
        ("4.52", 4, TWO_TOLERANCES, 0.0),
        ("991", 1001, TWO_TOLERANCES, 1.0),  # a share of the answer, not of the response
        ("1011.05", 1001, TWO_TOLERANCES, 0.0),
        ("-991", -1001, TWO_TOLERANCES, 1.0),
        ("-1011.05", -1001, TWO_TOLERANCES, 0.0),
        ("nothing", 5, {}, 0.0),
        ("5", None, {}, None),
    ],
)
def test_numeric(completion, answer, options, value):
    assert number(completion, answer, **options) == value


def test_an_answer_without_a_number_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="the answer 'four' holds no number"):
        number("4", "four")


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"thus $\frac{2}{4}$", "1/2", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{x^2+2x+1}", r"$(x+1)^2$", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        (r"\boxed{3}", "1 + 1 = 2\n#### 2", 0.0),
        (r"It costs \boxed{\$18.90}", r"\$18.90", 1.0),  # a currency is no formula's end
        (r"\boxed{36}", r"\$36", 1.0),
        (r"\boxed{32348}", r"\$32,\!348", 1.0),
        (r"\boxed{36}", r"$\$36$", 1.0),
        (r"\boxed{37}", r"\$36", 0.0),
        ("no idea", "2", 0.0),
        ("", "2", 0.0),
        ("2", None, None),
    ],
)
def test_math(completion, answer, value):
    assert same(completion, answer) == value


def test_an_answer_that_is_no_mathematics_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="is no mathematics"):
        same("2", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("<think>a</think> 4", 0.0),
        ("well: <think>a</think><answer>4</answer>", 0.0),
    ],
)
def test_the_default_format_is_thinking_and_then_an_answer(text, value):
    assert make_format(FormatOptions().pattern, "full")(text) == value


def test_a_format_may_be_searched_for():
    assert make_format(r"####\s*\d+", "search")("so #### 72.") == 1.0


@pytest.mark.parametrize(
    ("length", "value"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (500, -2.0)]
)
def test_the_overlong_penalty_of_dapo(length, value):
    # L_max = 100, B = 20, factor 2: -(length - 80) / 20 * 2 between 80 and 100
    assert soft_overlong(length, max_tokens=100, buffer_tokens=20, penalty=2.0) == pytest.approx(value)


def test_no_penalty_is_not_minus_zero():
    assert str(soft_overlong(1, max_tokens=100, buffer_tokens=20, penalty=1.0)) == "0.0"


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FormatOptions(pattern="(a"),
            "not a regular expression: missing \\), unterminated subpattern",
        ),
        (
            lambda: LengthOptions(max_tokens=10, buffer_tokens=20),
            "buffer_tokens = 20 is more than max_tokens = 10",
        ),
        (
            lambda: PythonOptions(path="mine.py"),
            "'mine.py' would be run with your rights. .* allow_local_code = true",
        ),
        (lambda: PythonOptions(path="mine.txt", allow_local_code=True), "path = 'mine.txt' must end in .py"),
    ],
)
def test_a_wrong_option_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_conversations_are_lists_of_one_message():
    seen = as_conversations(lambda completions, prompts, answer: (completions, prompts, answer))
    assert seen(completions=["a"], prompts=["q"], answer=["x"]) == (
        [[{"role": "assistant", "content": "a"}]],
        [[{"role": "user", "content": "q"}]],
        ["x"],
    )


@pytest.mark.parametrize(
    "function",
    [lambda prompts: prompts, lambda prompts, **columns: prompts, lambda prompts, messages: prompts],
)
def test_the_prompt_of_a_row_with_messages_is_these_messages(function):
    reward = RewardFunction("python", as_conversations(function), {})
    rows = [rollout_of("<s>q", messages=CHAT), rollout_of("r")]
    given = arguments("python", reward.signature, rows)
    assert reward.call(given) == [CHAT, [{"role": "user", "content": "r"}]]


def test_the_prompt_of_a_function_in_singular_form_is_the_messages_of_its_row():
    chat = as_conversations(lambda prompt, completion: (prompt, completion))
    answer = [{"role": "assistant", "content": "a"}]
    assert chat(prompt="<s>q", completion="a", messages=CHAT) == (CHAT, answer)
    assert chat(prompt="q", completion="a") == ([{"role": "user", "content": "q"}], answer)


NUMERIC = {"tolerance": 1e-3, "relative_tolerance": 0.0, "boxed": "prefer"}
EXACT = {"after": "Answer:", "ignore_case": True, "strip": True}


@pytest.mark.parametrize(
    ("reward", "completion", "pred"),
    [
        (lambda c: numeric(c, "72", **NUMERIC), "so 72.0", "72"),
        (lambda c: numeric(c, "72", **NUMERIC), "so 72.0001", "72"),  # within the tolerance: the same answer
        (lambda c: numeric(c, "72", **NUMERIC), "7,100.50 or so", "7100.5"),
        (lambda c: numeric(c, "72", **NUMERIC), "who knows", None),
        (lambda c: numeric(c, "72", **NUMERIC | {"boxed": "only"}), "72", None),
        (lambda c: exact_match(c, "yes", **EXACT), "Answer: YES ", "yes"),
        (lambda c: exact_match(c, "yes", **EXACT), "YES", None),
        (lambda c: same_mathematics(c, "1/2", precision=6, strict=True), r"\boxed{0.5}", "1/2"),
        (lambda c: same_mathematics(c, "1/2", precision=6, strict=True), r"$\frac{2}{3}$", "2/3"),
        (lambda c: same_mathematics(c, "1/2", precision=6, strict=True), "", None),
    ],
)
def test_equal_answers_are_one_text_to_vote_for(reward, completion, pred):
    assert reward(completion)["pred"] == pred
