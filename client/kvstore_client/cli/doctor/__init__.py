"""kvctl doctor: looks at everything around a daemon that can be wrong, and says how to mend it. Changes nothing."""
