"""The parts that every benchmark needs: a daemon to measure, blocks to store, times to compare, a row to report."""
