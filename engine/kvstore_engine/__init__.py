"""A llama.cpp/ggml-based inference engine whose KV state is in kvstored."""
