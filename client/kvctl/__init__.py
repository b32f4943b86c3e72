"""kvctl: an operator's view of a live daemon, over the admin socket."""
