"""Torture runs: one harness a file, each of which breaks a real store on purpose and compares it with a plain model."""
