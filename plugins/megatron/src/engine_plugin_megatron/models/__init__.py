"""Models for megatron-core: their configs from those of Hugging Face, their modules, and their weights by the names of a folder."""
