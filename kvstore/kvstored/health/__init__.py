"""The daemon looks after itself: periodic work, its own books, and damage before a reader finds it."""
