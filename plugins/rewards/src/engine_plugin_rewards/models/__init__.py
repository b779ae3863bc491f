"""Rewards by a model: frozen models of a run that its ``reward`` phase queries.

::

    roles.py       the roles that a run's rewards need, and the rewards that query them
    sequences.py   a prompt and its response as the tokens that a reward model was trained on
    classifier.py  the base of all; `[reward.model]`: the score of a sequence classifier
    questions.py   the questions to a judge, and the base of both kinds of judge
    judge.py       `[reward.judge]`: a verdict read from a language model's answer
    verdict.py     `[reward.verdict]`: the same from its probabilities, in one forward pass
    folders.py     checks before any model is built

Each returns the outcome of every sample (``engine_core.rewards``), so that weights, clipping, failures and metrics are
those of any reward. Left out: training these models (``trainer = "reward_model"``).
"""
