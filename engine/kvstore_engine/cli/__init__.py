"""The command `kvengine`."""
