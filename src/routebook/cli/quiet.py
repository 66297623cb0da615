"""What transformers and the hub's client say of their own accord, and what of it a user should see."""

from __future__ import annotations

import sys

from routebook.models import BUNDLED_MODELS

# One warns of long prompts, which are refused in our own words; the other counts retries of a hub out of reach.
_TALKATIVE = ("transformers.tokenization_utils_base", "huggingface_hub.utils._http")


def quiet_loading(model: str) -> None:
    """Mute what is not for the user: two loggers, and the bar of loading weights where it is noise.

    A model that is not bundled may take minutes to load, so a terminal keeps its bar. Warnings about the weights
    themselves are kept everywhere, and so are the hub's bars of downloads.

    Call it after the engine is known to be installed.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    for name in _TALKATIVE:
        logging.get_logger(name).setLevel(logging.ERROR)
    if model not in BUNDLED_MODELS and sys.stderr.isatty():
        return
    downloads_shown = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()
