"""The job of ``engine demo``: word problems, a random model, a warm start by SFT, GRPO, and a report."""
