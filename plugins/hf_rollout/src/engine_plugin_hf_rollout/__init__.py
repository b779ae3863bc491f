"""The rollout engine ``hf``, which samples with transformers models."""
