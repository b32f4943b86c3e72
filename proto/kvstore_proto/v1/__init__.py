"""The generated wire code of kvstore.v1. Written by proto/generate.sh, never by hand."""
