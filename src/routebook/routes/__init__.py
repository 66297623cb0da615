"""What a record of routed experts is: its schema, arithmetic, wire form, files and comparison.

Needs numpy, msgspec and zstandard, and nothing else.
"""

from routebook.routes.codec import CODEC_NAMES
from routebook.routes.compare import Comparison, Difference, compare
from routebook.routes.file import RoutesWriter, read_routes
from routebook.routes.formats.vllm import from_vllm, to_vllm
from routebook.routes.frame import decode_frame, encode_frame
from routebook.routes.load import ExpertLoad, expert_load
from routebook.routes.provenance import Origin, Provenance
from routebook.routes.record import RoutedExperts
from routebook.routes.sample import RouteSample
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import token_hashes

__all__ = [
    "CODEC_NAMES",
    "Comparison",
    "Difference",
    "ExpertLoad",
    "Origin",
    "Provenance",
    "RouteSample",
    "RouteSchema",
    "RoutedExperts",
    "RoutesWriter",
    "compare",
    "decode_frame",
    "encode_frame",
    "expert_load",
    "from_vllm",
    "read_routes",
    "to_vllm",
    "token_hashes",
]
