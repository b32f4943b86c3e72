#!/bin/sh
# tokenizers 0.23.3: a token added with `add_tokens` gets the number of tokens as its id, not one above the largest id.
# In a vocabulary with a gap, as pruning leaves it, that may be another token's id. `add_tokens` counts it as added,
# without an error or a warning: both texts then have the same ids, for a model and for a cache keyed by ids, and `decode`
# turns the old token into the new one. So close the gaps first, or compare `token_to_id` with the vocabulary before.
#
# Output seen (ids 0 to 3 and 5 are in use, then two tokens are added):
#     WordLevel: added 2, <call> 5, <end> 6
#     WordLevel: "go to Rome" [1, 2, 5] is decoded as go to <call>; "go to <call>" [1, 2, 5]
#     BPE: added 2, <call> 5, <end> 6
#     BPE: "go to Rome" [1, 2, 5] is decoded as go to <call>; "go to <call>" [1, 2, 5]
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet tokenizers==0.23.3
"$place/venv/bin/python" - <<'PYTHON' 2>"$place/errors" | tee "$place/output"
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = {"?": 0, "go": 1, "to": 2, "see": 3, "Rome": 5}
for model in (models.WordLevel(VOCABULARY, unk_token="?"), models.BPE(VOCABULARY, [], unk_token="?", ignore_merges=True)):
    kind, tokenizer = type(model).__name__, Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    before = tokenizer.encode("go to Rome").ids
    assert tokenizer.decode(before) == "go to Rome"
    added = tokenizer.add_tokens(["<call>", "<end>"])
    assert tokenizer.encode("go to Rome").ids == before and tokenizer.get_vocab()["Rome"] == 5
    print(f"{kind}: added {added}, <call> {tokenizer.token_to_id('<call>')}, <end> {tokenizer.token_to_id('<end>')}")
    print(
        f'{kind}: "go to Rome" {before} is decoded as {tokenizer.decode(before)}; '
        f'"go to <call>" {tokenizer.encode("go to <call>").ids}'
    )
PYTHON
diff - "$place/output" <<'SEEN'
WordLevel: added 2, <call> 5, <end> 6
WordLevel: "go to Rome" [1, 2, 5] is decoded as go to <call>; "go to <call>" [1, 2, 5]
BPE: added 2, <call> 5, <end> 6
BPE: "go to Rome" [1, 2, 5] is decoded as go to <call>; "go to <call>" [1, 2, 5]
SEEN
