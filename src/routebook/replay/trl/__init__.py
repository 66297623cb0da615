"""Rollout Routing Replay (R3) for TRL's `GRPOTrainer`, which has none.

    trainer = R3GRPOTrainer(
        model="Qwen/Qwen3-30B-A3B",
        reward_funcs=reward,
        args=GRPOConfig(...),
        train_dataset=prompts,
        rollout_func=EngineRollouts(LLM("Qwen/Qwen3-30B-A3B")),
    )
    trainer.train()

Raises MissingExtraError when imported without TRL.
"""

from routebook.replay.trl.config import ReplayConfig
from routebook.replay.trl.engine_rollouts import EngineRollouts
from routebook.replay.trl.route_book import Rollout, RouteBook
from routebook.replay.trl.server_rollouts import ServerRollouts
from routebook.replay.trl.trainer import R3GRPOTrainer

__all__ = [
    "EngineRollouts",
    "R3GRPOTrainer",
    "ReplayConfig",
    "Rollout",
    "RouteBook",
    "ServerRollouts",
]
