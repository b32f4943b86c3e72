"""Our engine beside llama.cpp: its server and its library as sides of a comparison, each in processes of its own."""
