"""The predictors that there are: each name with the address of what makes it; "" for the one that predicts nothing.

Outside of `store.prefetch`: the configuration allows these names, and is read before that package and numpy are loaded.
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
