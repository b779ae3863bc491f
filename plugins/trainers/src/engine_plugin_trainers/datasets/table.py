"""The public data sets that ``[data] source`` knows by name: one table, and the options of each set.

Every revision is a commit of the hub repository that public projects pin, too:

* ``math``, ``aime25``: the evaluations of inspect_evals;
* ``math``, ``aime24``, ``deepscaler``: task sets for the library verifiers;
* ``hh_rlhf``: the task curation of marin-community/marin;
* ``aime24``, ``deepscaler``, ``openr1_math``, ``tulu3_sft``: the hub's pages of the repository name it as the newest commit;
* ``gsm8k``, ``math500``, ``dapo_math_17k``, ``ultrafeedback``, ``ultrachat``: five or more training and evaluation
  repositories each, all the same commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import Field

from engine_core.specs import FilePath, Options
from engine_plugin_trainers.datasets import conversion

HUB = "https://huggingface.co/datasets/"
FINAL_LINE = 'Let\'s think step by step and output the final answer after "####".'
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
MESSAGES = "list of role, content"


class DatasetOptions(Options):
    """``[data.NAME]``: options of a public data set."""

    folder: FilePath | None = None
    """A folder with the files of the hub repository, as ``hf download REPO --repo-type dataset --local-dir FOLDER`` writes it, relative to the run file. Default: the hub."""
    revision: str = ""
    """A commit, tag or branch of the hub repository. Default: the commit of the table of data sets."""
    limit: int = Field(0, ge=0)
    """Take only the first rows of each split. 0: all rows."""


class QuestionOptions(DatasetOptions):
    """``[data.NAME]``: options of a public data set of questions with answers."""

    suffix: str | None = None
    """A text after each question, separated by a space unless it begins with white space. Default: the text of the table of data sets. An empty text: none."""
    shots: int = Field(0, ge=0)
    """Number of worked examples before each question: the first rows of the training split, which training then leaves out."""


class PairOptions(DatasetOptions):
    """``[data.NAME]``: options of a public data set of pairs of responses."""

    unpaired: bool = False
    """For the trainer ``kto``: make two rows of each pair, one for each response, with the column ``label``."""


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A public data set: where it is, what its rows hold, and what they fit."""

    content: str  #: one noun phrase
    repo: str  #: name on the hub
    revision: str  #: commit of the hub repository
    license: str  #: SPDX identifier, or what the data set card says
    columns: Mapping[str, str]  #: columns of the hub repository that are required, with their types
    trainers: tuple[str, ...]  #: values of ``trainer`` that can learn from it
    config: str | None = None  #: configuration (subset) on the hub
    train: str = ""  #: split on the hub of our split ``train``; empty: none
    validation: str = ""  #: split on the hub of our split ``validation``; empty: none
    rows: Mapping[str, int] = field(default_factory=dict)  #: rows of our splits on the hub
    reward: str = ""  #: reward that fits; empty: none is needed
    suffix: str = ""  #: text after each question
    convert: Callable[[conversion.Row], conversion.Row] = dict  #: makes our columns of a row
    usable: Callable[[conversion.Row], bool] | None = None  #: whether a row can be used; None: each one can

    @property
    def url(self) -> str:
        """The address of the data set card."""
        return HUB + self.repo

    @property
    def pairs(self) -> bool:
        """Whether the rows are pairs of responses."""
        return "dpo" in self.trainers

    @property
    def options(self) -> type[DatasetOptions]:
        """The option model."""
        if self.pairs:
            return PairOptions
        return QuestionOptions if self.reward else DatasetOptions


SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        content="grade-school word problems with worked solutions",
        repo="openai/gsm8k",
        config="main",
        revision="740312add88f781978c0658806c59bc2815b9866",
        license="MIT",
        train="train",
        validation="test",
        rows={"train": 7473, "validation": 1319},
        columns={"question": "text", "answer": "text that ends in #### and the number"},
        trainers=("rl", "sft"),
        reward="numeric",
        suffix=FINAL_LINE,
        convert=conversion.gsm8k,
    ),
    "math": PublicSet(
        content="competition problems with solutions (MATH)",
        repo="DigitalLearningGmbH/MATH-lighteval",
        config="default",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
        license="MIT",
        train="train",
        validation="test",
        rows={"train": 7500, "validation": 5000},
        columns={"problem": "text", "level": "text", "solution": r"text with \boxed{}", "type": "text"},
        trainers=("rl", "sft"),
        reward="math",
        suffix=BOXED,
        convert=conversion.math,
    ),
    "math500": PublicSet(
        content="500 held-out problems of MATH",
        repo="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        license="none stated (MATH: MIT)",
        validation="test",
        rows={"validation": 500},
        columns={
            "problem": "text",
            "solution": "text",
            "answer": "text",
            "subject": "text",
            "level": "int",
            "unique_id": "text",
        },
        trainers=(),
        reward="math",
        suffix=BOXED,
        convert=conversion.problem,
    ),
    "aime24": PublicSet(
        content="the 30 problems of AIME 2024",
        repo="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        license="none stated",
        validation="train",
        rows={"validation": 30},
        columns={
            "id": "int",
            "problem": "text",
            "solution": "text",
            "answer": "text",
            "url": "text",
            "year": "text",
        },
        trainers=(),
        reward="numeric",
        suffix=BOXED,
        convert=conversion.problem,
    ),
    "aime25": PublicSet(
        content="the 30 problems of AIME 2025",
        repo="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        license="Apache-2.0",
        validation="test",
        rows={"validation": 30},
        columns={"problem": "text", "answer": "text", "id": "text"},
        trainers=(),
        reward="numeric",
        suffix=BOXED,
        convert=conversion.problem,
    ),
    "dapo_math_17k": PublicSet(
        content="math problems with integer answers of DAPO, without repeated rows",
        repo="open-r1/DAPO-Math-17k-Processed",
        config="all",
        revision="31dd309567e3da778038cc87d868b6097a3ccf68",
        license="none stated (BytedTsinghua-SIA/DAPO-Math-17k: Apache-2.0)",
        train="train",
        rows={"train": 17398},
        columns={
            "prompt": "text",
            "solution": "text, the answer",
            "data_source": "text",
            "source_prompt": MESSAGES,
            "ability": "text",
            "reward_model": "ground_truth, style",
            "extra_info": "index",
        },
        trainers=("rl",),
        reward="numeric",
        suffix=BOXED,
        convert=conversion.dapo,
    ),
    "deepscaler": PublicSet(
        content="competition problems of AIME, AMC, Omni-MATH and STILL",
        repo="agentica-org/DeepScaleR-Preview-Dataset",
        revision="b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29",
        license="MIT",
        train="train",
        rows={"train": 40315},
        columns={"problem": "text", "answer": "text", "solution": "text, may be empty"},
        trainers=("rl",),
        reward="math",
        suffix=BOXED,
        convert=conversion.problem,
        usable=conversion.has_answer,
    ),
    "openr1_math": PublicSet(
        content="math problems with verified reasoning of DeepSeek-R1",
        repo="open-r1/OpenR1-Math-220k",
        config="default",
        revision="e4e141ec9dea9f8326f4d347be56105859b2bd68",
        license="Apache-2.0",
        train="train",
        rows={"train": 93733},
        columns={
            "problem": "text",
            "solution": "text",
            "answer": "text",
            "problem_type": "text",
            "question_type": "text",
            "source": "text",
            "uuid": "text",
            "messages": MESSAGES,
        },
        trainers=("rl", "sft"),
        reward="math",
        suffix=BOXED,
        convert=conversion.openr1,
    ),
    "ultrafeedback": PublicSet(
        content="pairs of chat responses, ranked by GPT-4",
        repo="HuggingFaceH4/ultrafeedback_binarized",
        revision="3949bf5f8c17c394422ccfab0c31ea9c20bdeb85",
        license="MIT",
        train="train_prefs",
        validation="test_prefs",
        rows={"train": 61135, "validation": 2000},
        columns={
            "prompt": "text",
            "prompt_id": "text",
            "chosen": MESSAGES,
            "rejected": MESSAGES,
            "messages": MESSAGES,
            "score_chosen": "float",
            "score_rejected": "float",
        },
        trainers=("dpo", "reward_model", "kto"),
        convert=conversion.ultrafeedback,
        usable=conversion.different,
    ),
    "hh_rlhf": PublicSet(
        content="pairs of helpful and harmless responses, ranked by people",
        repo="Anthropic/hh-rlhf",
        revision="09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        license="MIT",
        train="train",
        validation="test",
        rows={"train": 160800, "validation": 8552},
        columns={"chosen": "text with Human and Assistant turns", "rejected": "the same"},
        trainers=("dpo", "reward_model", "kto"),
        convert=conversion.hh_rlhf,
        usable=conversion.one_reply_differs,
    ),
    "tulu3_sft": PublicSet(
        content="conversations of many kinds (Tulu 3)",
        repo="allenai/tulu-3-sft-mixture",
        revision="b14afda60f1bbebe55d5d2fa1e4df5042f97f8be",
        license="ODC-By-1.0 (parts: non-commercial)",
        train="train",
        rows={"train": 939343},
        columns={"id": "text", "messages": MESSAGES, "source": "text"},
        trainers=("sft",),
    ),
    "ultrachat": PublicSet(
        content="conversations about many topics, filtered",
        repo="HuggingFaceH4/ultrachat_200k",
        revision="8049631c405ae6576f93f445c6b8166f76f5505a",
        license="MIT",
        train="train_sft",
        validation="test_sft",
        rows={"train": 207865, "validation": 23110},
        columns={"prompt": "text", "prompt_id": "text", "messages": MESSAGES},
        trainers=("sft",),
        convert=conversion.ultrachat,
    ),
}
