"""The HTTP server: OpenAI's API over the batch engine, in three processes.

    HTTP (`run`, `app`)  --frames-->  scheduler and daemon session (`engine_process`)  --orders-->  ggml (`worker`)

A process that dies is started again. The first tokenises prompts and renders answers; the second sees only the text of
answers; the third sees token ids only. On a device of torch's the second computes by itself (`computing`).
"""
