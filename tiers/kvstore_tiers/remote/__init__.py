"""A key-addressed tier on a store that exists: Mooncake Store, Redis or Valkey, S3 and its like."""
