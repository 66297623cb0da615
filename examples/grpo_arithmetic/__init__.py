"""GRPO with and without Rollout Routing Replay, in miniature: `python -m examples.grpo_arithmetic --short`."""
