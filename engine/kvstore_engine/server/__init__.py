"""The HTTP server: OpenAI's API over the batch engine, in three processes.

    HTTP (`run`, `app`)  --frames-->  scheduler and daemon session (`engine_process`)  --orders-->  ggml (`worker`)

A process is started anew when it dies. Prompts are tokenised and answers rendered in the first; the second never sees
text but the answers' own; the third sees token ids only.
"""
