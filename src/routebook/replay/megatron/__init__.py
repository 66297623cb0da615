"""Replay in a model of megatron-core, whichever class of `RouterReplay` its routers have.

    plan = parallel_plan(model[0].config)
    bridge = RouterBridge(model, records[0].schema)

    def forward_step(batches, chunk):
        batch = next(batches)                                     # a routes.layout.MicroBatch and its tensors
        rows = batch.routes.rows_for(parallel_rank(chunk))
        with schedule.forward(chunk, rows):
            output = chunk(batch.tokens, batch.position_ids, batch.attention_mask)
        return output, loss_function

    with bridge.schedule() as schedule:
        forward_backward_func(forward_step_func=forward_step, ...)

Nothing of megatron-core is imported but by `parallel_rank`: routers are known by what they have, so that megatron-core
0.16 to 0.19 and the class by which verl replaces `RouterReplay` are all the same here.
"""

from routebook.replay.megatron.bridge import RouterBridge
from routebook.replay.megatron.plan import parallel_plan, parallel_rank
from routebook.replay.megatron.schedule import ReplaySchedule

__all__ = ["ReplaySchedule", "RouterBridge", "parallel_plan", "parallel_rank"]
