"""Values that the real writers of vLLM and SGLang made; see `tests.routes.peer_values`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats import get_format
from tests.routes.peer_values import PATH
from tests.routes.strategies import tokens

VALUES = json.loads(PATH.read_text())


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("writer", ["vllm 0.32.0", "sglang 0.5.23"])
def test_what_the_real_writer_wrote_is_read_and_written_alike(writer, case):
    made = VALUES[case]
    schema = RouteSchema(**made["schema"])
    ids = np.array(made["ids"], schema.dtype)
    fmt = get_format(writer.split()[0])
    token_ids = tokens(len(ids) + 3)
    read = fmt.decode(made[writer], schema, token_ids, 2)
    assert (read.start, read.stop) == (2, 2 + len(ids))
    assert np.array_equal(read.ids_TLK, ids)
    assert fmt.encode(RoutedExperts.from_rows(schema, ids, token_ids, 2)) == made[writer]


def test_ids_beyond_a_byte_are_among_them():
    assert np.array(VALUES["uint16"]["ids"]).max() > 255
