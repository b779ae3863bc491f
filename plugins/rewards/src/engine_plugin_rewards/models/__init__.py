"""Rewards that a model gives: frozen models of a run that are asked in its ``reward`` phase.

::

    roles.py       which roles a run's rewards need, and what asks them
    sequences.py   a prompt and its response as the tokens that a reward model was trained on
    classifier.py  `[reward.model]`: the score of a sequence classifier
    questions.py   what a judge is asked
    asking.py      what both kinds of judge share
    judge.py       `[reward.judge]`: a verdict read from what a language model writes
    verdict.py     `[reward.verdict]`: the same from its probabilities, in one forward pass
    folders.py     what is refused before any model is built

Each gives the outcome of every sample (``engine_core.rewards``), so that weights, clipping, failures
and metrics are those of any reward. Left out: training them (``trainer = "reward_model"``).
"""
