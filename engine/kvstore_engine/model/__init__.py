"""Model description and weights: what a GGUF file says, checked, and ready for the graph."""
