"""What is known of key-addressed tiers that other nodes share: whether asking them pays, and what they do not have."""
