"""What an operator asks of a live daemon: views, dropping, and its lifetime."""
