"""Forms in which other engines and trainers write routed experts; conversion happens at this edge.

| name       | value                                                     | layers | absent rows | it drops             |
|------------|-----------------------------------------------------------|--------|-------------|----------------------|
| `vllm`     | base64 of `.npy`, uint8 or uint16                         | all    | refused     | start, provenance    |
| `sglang`   | base64 of raw int32                                       | all    | refused     | start, provenance    |
| `skyrl`    | object `{data, shape, dtype}`                             | all    | refused     | start, provenance    |
| `prime_rl` | object `{data, shape, dtype, start}`                      | all    | refused     | provenance           |
| `nemo_rl`  | text `nrlre1:<dtype>:<SxLxK>:<base64>`, one row per token | MoE    | -1          | start, provenance    |
| `frame`    | object of a frame's fields and base64 data                | MoE    | mask        | nothing              |

All but `frame` drop the schema and the hashes too; a reader must know the schema, the tokens and
the start from elsewhere. The order of ids within a row is always kept.
"""

from collections.abc import Mapping
from types import MappingProxyType

from routebook.errors import RequestError
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.frame import FRAME_MEDIA_TYPE, FrameFormat
from routebook.routes.formats.nemo_rl import NeMoRLFormat
from routebook.routes.formats.prime_rl import PrimeRLFormat
from routebook.routes.formats.sglang import SGLangFormat
from routebook.routes.formats.skyrl import SkyRLFormat
from routebook.routes.formats.vllm import VLLMFormat

FORMATS: Mapping[str, RouteFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            VLLMFormat(),
            SGLangFormat(),
            SkyRLFormat(),
            PrimeRLFormat(),
            NeMoRLFormat(),
            FrameFormat(),
        )
    }
)
"""Every format by its name."""

FORMAT_NAMES = tuple(FORMATS)

__all__ = ["FORMATS", "FORMAT_NAMES", "FRAME_MEDIA_TYPE", "RouteFormat", "get_format"]


def get_format(name: str) -> RouteFormat:
    """The format of this name.

    Raises:
        RequestError: there is none.
    """
    if name not in FORMATS:
        raise RequestError(
            f"routed_experts_format={name!r} is not known; use one of {', '.join(FORMAT_NAMES)}"
        )
    return FORMATS[name]
