"""The models that ship with the package."""

from __future__ import annotations

from pathlib import Path

from routebook.errors import ModelNotFoundError

BUNDLED_MODELS = ("tiny",)


def bundled_model_path(name: str) -> Path:
    """The folder of the bundled model `name`: config, weights, tokenizer and model card.

    Raises:
        ModelNotFoundError: no model of that name is bundled; the message lists the names.
    """
    if name not in BUNDLED_MODELS:
        raise ModelNotFoundError(
            f"no bundled model is called {name!r}; use one of {', '.join(BUNDLED_MODELS)}"
        )
    return Path(__file__).parent / name
