"""The names of predictors, each with the address of its maker; "" for the one that predicts nothing.

This file is outside of `store.prefetch`: the configuration allows these names, and is read before that package and
numpy are loaded.
"""

from __future__ import annotations

from typing import Final

NONE: Final = "none"
ON_HINT: Final = "on-hint"
LEARNED: Final = "learned"  # made with a model
PREDICTORS: Final[dict[str, str]] = {
    NONE: "",
    ON_HINT: "kvstored.store.prefetch.on_hint:OnHint",
    "session-return": "kvstore_predictor.session_return:SessionReturn",
    "markov": "kvstore_predictor.markov:Markov",
    "ensemble": "kvstore_predictor.ensemble:Ensemble",
    LEARNED: "kvstored.store.prefetch.model_file:learned",
}
