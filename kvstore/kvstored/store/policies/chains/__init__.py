"""The parts of `chain_hazard`: chains, their features, hazard tables, the index that ranks them, the guard."""
