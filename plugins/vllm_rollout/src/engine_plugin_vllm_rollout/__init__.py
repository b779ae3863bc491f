"""Rollout engine ``vllm``: sampling with vLLM in the process of the train engine."""
