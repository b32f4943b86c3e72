"""What `chain_hazard` is made of: chains, their features, hazard tables, the index that ranks them, the guard."""
