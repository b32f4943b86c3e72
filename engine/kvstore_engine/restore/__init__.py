"""Using kvstored from the engine: restore a prompt's prefix instead of computing it, and store what was
computed.
"""
