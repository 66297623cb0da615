"""What a run is made of."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.config import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One comparison: every seed trains twice, on the live routers and along the engine's routes.

    Raises:
        ConfigError: a value that cannot work.
    """

    steps: int
    """Optimizer steps; each has rollouts of its own."""
    seeds: tuple[int, ...]
    """Seeds of prompts and sampling."""
    warm_up_steps: int = 75
    """Supervised steps before; all runs begin with the model that they make."""
    prompts_per_step: int = 8
    completions_per_prompt: int = 8
    learning_rate: float = 1e-4
    num_iterations: int = 1
    """Updates on the same rollouts; above 1 the old log-probabilities are those of a pass before the first."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_at_least("steps", self.steps, 1)
        check_at_least("warm_up_steps", self.warm_up_steps, 0)
        check_at_least("len(seeds)", len(self.seeds), 1)
        check_at_least("prompts_per_step", self.prompts_per_step, 1)
        check_at_least("completions_per_prompt", self.completions_per_prompt, 2)
        check_at_least("num_iterations", self.num_iterations, 1)


SHORT = Settings(steps=30, seeds=(0, 1, 2))
"""Minutes of one core."""
LONG = Settings(steps=200, seeds=(0, 1, 2, 3, 4), prompts_per_step=16)
"""For a GPU."""
