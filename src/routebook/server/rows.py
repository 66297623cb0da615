"""The routed experts of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routebook.errors import RecordError
from routebook.routes import RoutedExperts
from routebook.routes.formats import RouteFormat
from routebook.server.json_body import Spliced


@dataclass(frozen=True, slots=True)
class RowsField:
    """The rows of one completion, or of an increment of it, as fields of a JSON object."""

    format: RouteFormat

    def fields(self, record: RoutedExperts | None) -> dict[str, Any]:
        """The fields to add; none without a record.

        A record that the format cannot express, since rows are absent in it, is answered with the reason: the tokens
        are good all the same.
        """
        if record is None:
            return {}
        try:
            parts = self.format.json_parts(record)
        except RecordError as error:
            return {"routed_experts": None, "routed_experts_error": str(error)}
        return {"routed_experts": Spliced(parts), "routed_experts_start": record.start}
