"""An operator's calls to a live daemon: views, removal of blocks, and its lifetime."""
