"""Expected verdicts of a real engine against transformers' own logits of one question after the other."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_core.errors import DataError

TEMPLATE = "Right? {question} {completion} ({answer})"
WORDS = ["", "4", "four", "7" * 30]
SHOWN = {"1": 1.0, "2": 2.0, "5": 5.0}


def columns_of(words):
    return {"completion": words, "prompt": ["2+2"] * len(words), "answer": ["4"] * len(words)}


def by_hand(path, tokenizer, words, verdicts):
    """Return the expected value and the probability of all other tokens, from full logits in float64."""
    model = AutoModelForCausalLM.from_pretrained(path).double().eval()
    values, others = [], []
    for word in words:
        ids = tokenizer(f"<|user|>Right? 2+2 {word} (4)<eos>\n<|assistant|>")["input_ids"]
        with torch.no_grad():
            p = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
        mass = {v: p[tokenizer.convert_tokens_to_ids(v)].item() for v in verdicts}
        values.append(sum(mass[v] * x for v, x in verdicts.items()) / sum(mass.values()))
        others.append(1 - sum(mass.values()))
    return values, sum(others) / len(others)


@pytest.fixture
def judge_folder(folder_of):
    return folder_of("judge", kind=folder_of.language_model)


@pytest.mark.parametrize("verdicts", [SHOWN, {"Y": 1.0, "N": -1.0}], ids=["digits", "yes and no"])
@pytest.mark.parametrize("budget", [16, 8192], ids=["many micro-batches", "one pack"])
def test_the_reward_is_the_expected_verdict(asking, judge_folder, tokenizer, verdicts, budget):
    judge = asking("verdict", judge_folder, prompt=TEMPLATE, verdicts=verdicts, max_tokens_per_rank=budget)
    outcomes = judge.score(columns_of(WORDS), len(WORDS))
    values, other = by_hand(judge_folder, tokenizer, WORDS, verdicts)
    assert [o.value for o in outcomes] == pytest.approx(values, abs=1e-5)
    assert judge.metrics() == {"other_mass": pytest.approx(other, abs=1e-5)}
    assert max(values) - min(values) > 0.01  # the judge tells the answers apart


def test_rows_without_a_value_are_left_out_and_long_questions_fail_alone(asking, judge_folder, tokenizer):
    judge = asking("verdict", judge_folder, prompt=TEMPLATE, verdicts=SHOWN)
    columns = columns_of(["4", "4", "9" * 200])
    columns["answer"][1] = None
    outcomes = judge.score(columns, 3)
    assert [(o.value is None, o.failure) for o in outcomes] == [(False, ""), (True, ""), (True, "error")]
    assert outcomes[2].message.endswith("and the reward's model takes 1 to 127 (max_tokens)")
    assert outcomes[0].value == pytest.approx(by_hand(judge_folder, tokenizer, ["4"], SHOWN)[0][0], abs=1e-5)
    assert judge.score(columns_of([]), 0) == []
    assert judge.metrics() == {}


def test_verdicts_that_are_not_one_token_each_are_refused(asking, judge_folder):
    with pytest.raises(
        DataError, match=r"reward\.r\.verdict\.verdicts: 'Yes' is 3 tokens of the judge, expected one"
    ):
        asking("verdict", judge_folder, prompt="{completion}")


def test_probabilities_that_are_no_numbers_are_failures(asking, judge_folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{judge_folder}/model.safetensors")
    weights["model.norm.weight"][:] = math.nan
    save_file(weights, f"{judge_folder}/model.safetensors", metadata={"format": "pt"})
    (outcome,) = asking("verdict", judge_folder, prompt=TEMPLATE, verdicts=SHOWN).score(columns_of(["4"]), 1)
    assert outcome.message == "the judge gave probabilities that are no numbers"
