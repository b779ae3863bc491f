"""Rollout engine ``hf``: sampling with transformers models."""
