"""kvctl doctor: checks everything around a daemon that can be wrong, and says how to repair it. Changes nothing."""
