"""The end of a process that was one rank of a test."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def end_rank() -> NoReturn:
    """End this process, once all have come here, without tearing the interpreter down.

    All was told by now. A thread of gloo's that outlives the last line aborts the process at the interpreter's end, in
    one run of some hundred.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
