"""Endurance: how much may be written to the NVMe drive, so that one-time blocks do not wear it out."""
