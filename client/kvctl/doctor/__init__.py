"""kvctl doctor: checks a daemon and everything around it that can be wrong, and says how to repair it. It changes
nothing.
"""
