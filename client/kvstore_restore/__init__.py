"""The restoration of a stored prefix by computing its head and loading its tail at once: costs, plans, pointers,
order.
"""
